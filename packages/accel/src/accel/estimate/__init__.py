"""How much memory a model needs."""
