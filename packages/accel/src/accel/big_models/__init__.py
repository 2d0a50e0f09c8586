"""Models that are large for the available memory."""
