"""Optimizers, schedules, precision and gradient accumulation for distributed PyTorch."""
