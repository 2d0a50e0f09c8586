"""Data parallelism with replicated models."""
