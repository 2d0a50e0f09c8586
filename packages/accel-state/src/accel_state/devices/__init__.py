"""The hardware that a process computes on: which there is, and how each kind is addressed."""
