"""Compatibility with torchdata's loaders and samplers."""
