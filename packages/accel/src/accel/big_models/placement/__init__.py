"""Device maps: the layers of a model, the memory at hand, and which layer goes where."""
