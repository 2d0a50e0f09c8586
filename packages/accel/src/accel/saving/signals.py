"""The signals that announce that a machine is taken away, and the question whether any process got one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from accel.training.agreement import Agreement

if TYPE_CHECKING:
    from accel_state.process.facts import Process

__all__ = ["Preemption"]


class Preemption:
    """Notes the signals that announce the end, and asks whether any process has got one.

    Args:
        process: This process.
        signals: Names of the signals; those that the system does not have are passed over.

    Raises:
        RuntimeError: If this is not the main thread, which alone can take signals.
    """

    def __init__(self, process: Process, signals: Sequence[str]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "save_on_preemption takes signals, which only the main thread can: call it there."
            )
        self.received: str | None = None
        self._agreement = Agreement(process)
        # Windows has no SIGUSR1.
        numbers = [getattr(signal, name) for name in signals if hasattr(signal, name)]
        self._before = {number: signal.signal(number, self._note) for number in numbers}

    def agreed(self) -> bool:
        """Whether a process had got a signal at the call before; the same on all, which all call it."""
        return self._agreement.ask_ahead(self.received is not None)

    def stop(self) -> None:
        """Put back what was done on these signals before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:  # others set since are left alone
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        # The program's handler runs too, but for Python's own, which would raise KeyboardInterrupt.
        before: Any = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
