"""Watching a run: why it hangs, why it breaks, and where its time goes."""

from accel_state.step_events import Observer as Observer
