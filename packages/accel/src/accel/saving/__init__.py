"""save_state, load_state and related functions."""
