"""Nested data (dicts, lists, tuples, dataclasses) whose leaves are tensors: operations without communication."""
