"""A checkpoint folder: complete or absent, written by all processes."""
