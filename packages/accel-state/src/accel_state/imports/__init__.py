"""Which packages and which hardware are there."""
