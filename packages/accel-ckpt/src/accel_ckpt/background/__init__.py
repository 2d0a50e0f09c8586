"""Saves that go on in the background, out of copies in memory."""
