"""DeepSpeed: its engine and settings, and what stands between it and a training loop."""
