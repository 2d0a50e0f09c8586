"""Precision and compilation of models: autocast, fp8, regional compilation."""
