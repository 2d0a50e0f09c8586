"""Profiling a block of training with torch's profiler."""
