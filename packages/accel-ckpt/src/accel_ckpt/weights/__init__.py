"""Weight files, and the placement of weights in a model."""
