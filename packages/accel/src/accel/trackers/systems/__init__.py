"""One file for each system that trackers log to; each is imported on first use."""
