"""Single files of a checkpoint, and their digests."""
