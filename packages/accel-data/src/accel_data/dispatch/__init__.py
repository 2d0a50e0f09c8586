"""Loaders whose batches process 0 reads for all processes."""
