"""The output of workers, on its way to the console and to log files."""
