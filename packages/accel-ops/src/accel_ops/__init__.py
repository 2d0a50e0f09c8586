"""Collectives over nested data for distributed PyTorch."""
