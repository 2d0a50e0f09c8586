"""Device maps: the layers of a model, the available memory, and the device of each layer."""
