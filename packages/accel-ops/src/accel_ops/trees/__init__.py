"""Nested data (dicts, lists, tuples, dataclasses) whose leaves are tensors: all that needs no process."""
