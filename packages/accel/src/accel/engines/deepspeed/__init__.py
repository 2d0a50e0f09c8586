"""What stands between accel and DeepSpeed: its configuration, its wrappers, its checkpoints."""
