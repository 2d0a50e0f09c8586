"""From settings to what will be started."""
