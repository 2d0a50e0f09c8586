"""FSDP version 1."""
