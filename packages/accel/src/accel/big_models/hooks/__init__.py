"""Hooks on the forward of a module, including those that move its weights to their device for a forward."""
