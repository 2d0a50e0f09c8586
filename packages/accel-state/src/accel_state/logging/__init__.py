"""Loggers, warnings and tracebacks for runs of several processes."""
