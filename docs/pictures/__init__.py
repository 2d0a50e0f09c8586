"""Pictures of the manual: what runs them, and what draws them."""
