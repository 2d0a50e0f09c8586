"""Models that are large for the memory at hand."""
