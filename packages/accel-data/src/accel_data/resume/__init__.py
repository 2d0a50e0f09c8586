"""The position of a loader or a stream, and how to resume from it."""
