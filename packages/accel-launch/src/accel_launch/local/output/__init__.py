"""What workers print, on its way to the console and to log files."""
