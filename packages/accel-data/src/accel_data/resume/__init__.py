"""Where a loader or a stream is, and how it goes on from there."""
