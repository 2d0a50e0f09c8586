"""Run your own PyTorch training loop on one process or many, in any precision, under any engine."""
