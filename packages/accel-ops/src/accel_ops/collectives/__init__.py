"""Collective operations on nested data and objects."""
