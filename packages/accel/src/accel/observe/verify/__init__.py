"""What `accel verify` does in the runs that it compares, and how it compares them."""
