"""The state of a training run: saved, compared and restored."""
