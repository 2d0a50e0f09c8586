"""Saves in the background, from copies in memory."""
