"""Checkpoints and weight files for distributed PyTorch."""
