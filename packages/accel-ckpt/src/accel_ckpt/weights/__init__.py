"""Weight files, and where each weight of a model goes."""
