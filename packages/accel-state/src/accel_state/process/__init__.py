"""This process: who it is, how it finds the others, and what it can do with them."""
