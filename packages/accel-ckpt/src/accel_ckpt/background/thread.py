"""The save in the background, of which there is one at a time, and its process group."""

from __future__ import annotations

import atexit
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accel_state.process.rendezvous import before_destroy, gloo_group

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo


class _Save:
    """A save in a thread. The interpreter waits for it before it exits."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.error: BaseException | None = None
        # Not a daemon: the interpreter would kill one at exit, in the middle of a file.
        self.thread = threading.Thread(target=self._run, name="accel-save", daemon=False)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised by `wait`
            self.error = error
        del self._work  # and with it the copies of the state


_current: _Save | None = None


def start(work: Callable[[], None]) -> None:
    """Finish a save in the background. `wait` must have been called before.

    Args:
        work: Finishes the save.
    """
    global _current
    _current = _Save(work)
    # Registered again: atexit calls the latest first, so this runs before handlers
    # registered since the last save.
    for register in (atexit.unregister, atexit.register):
        register(_report_at_exit)
    # The thread uses a process group, which must not be destroyed before it ends.
    before_destroy(join)
    _current.thread.start()


def in_flight() -> bool:
    """Return whether a save is running in the background."""
    return _current is not None and _current.thread.is_alive()


def join() -> None:
    """Wait until no save is running in the background; an error is kept for `wait`."""
    # A thread cannot join itself, and code that the save runs may call this.
    if _current is not None and _current.thread is not threading.current_thread():
        _current.thread.join()


def wait() -> None:
    """Wait until the save in the background, if there is one, is committed.

    Raises:
        Exception: The error of the save, once.
    """
    global _current
    join()
    # Cleared before raising, so that the next `wait` does not raise the same error again.
    save, _current = _current, None
    if save is not None and save.error is not None:
        raise save.error


def group_for(process: ProcessInfo) -> Any:
    """Return the process group of saves in the background. Every process must call it.

    Its collectives never mix with those of the training loop, which continue meanwhile.

    Args:
        process: This process.

    Returns:
        The group; None for one process.
    """
    return None if process.world_size == 1 else gloo_group("saves in the background")


def _report_at_exit() -> None:
    """Report an error that no caller collected."""
    join()
    if _current is not None and _current.error is not None:
        print(
            "A save in the background has failed; the previous checkpoint is the newest:",
            file=sys.stderr,
        )
        traceback.print_exception(_current.error)
