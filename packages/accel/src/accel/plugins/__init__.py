"""Plugins: the settings of engines, one file each."""
