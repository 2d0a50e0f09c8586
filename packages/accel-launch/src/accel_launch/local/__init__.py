"""Workers of this machine: starting, supervising and stopping them."""
