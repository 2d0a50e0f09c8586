"""Watching a run: why it hangs, why it breaks, and where its time goes."""
