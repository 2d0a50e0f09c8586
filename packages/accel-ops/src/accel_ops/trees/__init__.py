"""Nested data (dicts, lists, tuples, dataclasses) of tensors: operations without communication."""
