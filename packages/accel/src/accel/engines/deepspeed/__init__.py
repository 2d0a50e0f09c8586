"""DeepSpeed: its engine and settings, and the wrappers that a training loop uses."""
