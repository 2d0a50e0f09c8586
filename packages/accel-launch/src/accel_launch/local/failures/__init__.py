"""Reports of runs that fail."""
