"""Hooks on the forward of a module, and those that bring its weights to their device for the time of it."""
