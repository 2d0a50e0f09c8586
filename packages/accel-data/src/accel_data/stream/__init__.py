"""Datasets that can only be read from the front."""
