"""Loaders for which process 0 reads the batches of all processes."""
