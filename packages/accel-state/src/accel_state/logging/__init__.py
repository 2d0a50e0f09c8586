"""What a run says: loggers, warnings and tracebacks that know of the other processes."""
