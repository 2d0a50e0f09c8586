"""Loaders and samplers of torchdata."""
