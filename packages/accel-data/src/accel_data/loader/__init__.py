"""Prepared loaders: what they have in common, and those that read their own share."""
