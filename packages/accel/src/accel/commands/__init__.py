"""Commands, under their documented paths: re-exports of accel-launch."""
