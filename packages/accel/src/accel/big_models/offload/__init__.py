"""Weights that are kept in memory or on the disk, and are on the device only while they are used."""
