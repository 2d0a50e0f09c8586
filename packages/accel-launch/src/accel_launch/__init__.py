"""One launcher for every PyTorch setup."""
