"""Trackers: one file each, found by name and imported on first use."""
