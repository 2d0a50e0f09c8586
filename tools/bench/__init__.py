"""The cost of accel, compared with plain PyTorch and its peers, measured side by side: `python -m tools.bench`."""
