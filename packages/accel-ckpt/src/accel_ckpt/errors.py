"""Errors of this package.

CheckpointError (a RuntimeError): a checkpoint could not be written or read.
    CorruptCheckpointError: its files are not what its manifest says.
"""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says what was wrong and what to do."""


class CorruptCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, changed or unreadable; the message names each of them."""
