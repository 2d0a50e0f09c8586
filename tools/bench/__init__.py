"""The cost of accel, plain PyTorch and its peers, measured side by side: `python -m tools.bench`."""
