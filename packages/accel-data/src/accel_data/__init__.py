"""Sharded, exact, resumable data loaders for PyTorch."""
