"""Cost of accel beside plain PyTorch and its peers, measured side by side: `python -m tools.bench`."""
