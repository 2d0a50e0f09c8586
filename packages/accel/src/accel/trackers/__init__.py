"""Trackers: what they have in common, which there are, and which are started."""
