"""Prepared loaders: their base class, and those that read their own shard."""
