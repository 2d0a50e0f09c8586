"""save_state and load_state, and what goes along with them."""
