"""The meeting of processes over the process group's store, on which debug mode stands.

A `Session` belongs to one process group. For each operation every process writes one text under the
operation's number and waits until all have written theirs. It polls, and never blocks in the store, so that
it can see meanwhile who has left, and ask where the missing ones are. Keys are deleted one operation later.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing.util
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from accel_ops.debug.life_lock import LifeLock, has_ended
from accel_ops.debug.monitor import Monitor
from accel_ops.debug.stack import why_exiting
from accel_state.logging.warning import warn
from accel_state.process.info import ProcessInfo

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

WARN_AFTER_S = 5.0
"""After so long a wait for others (seconds) there is one warning that says where they are."""

ANSWER_S = 2.0
"""How long to wait (seconds) for another process to say where it is."""

LINGER_S = 2.0
"""How long process 0, which may host the store, stays (seconds) for others to read why it leaves."""

_DESTROYED = "its process group was destroyed"
_ENDED = "ended without an exception: by os._exit or a signal, such as that of the system's memory killer"
_LOOK_EVERY_S = 0.05
_LOOK_FOR_LIFE_EVERY_S = 1.0
_PAUSES_S = (0.0002, 0.02)  # between two looks: at first, at most


class DistributedOperationException(Exception):
    """Processes do not do the same: collectives do not fit together, or one does not come; or their models or
    random generators are out of step.
    """


class Session:
    """This process's part in the meetings of one process group.

    Args:
        base: The process group's store.
        process: The facts of this process.
    """

    def __init__(self, base: Store, process: ProcessInfo) -> None:
        self.base = base
        self.rank = process.rank
        self.world = process.world_size
        self.count = 0
        self.last = ""
        self._gone = False
        self._old: list[str] = []
        self._noted: set[str] = set()
        self._life: LifeLock | None = None
        # A prefix, so that keys do not meet those of torch in the same store.
        self.store = prefixed("accel/check_collectives", base)
        self._monitor = Monitor(self.store, self.rank, self._notice_the_end)

    def begin(self) -> None:
        """Be ready to say where this process is, also before its first meeting."""
        self._show_life()
        self._monitor.watch()

    def end(self) -> None:
        """Release what the session holds, when the process or its group ends."""
        if self._life is not None:
            self._life.release()
            self._life = None

    def exchange(self, text: str, label: str) -> list[str]:
        """Write this process's text for the next operation, and wait for those of the others.

        Args:
            text: What the others are to read.
            label: Operation and place, for messages.

        Returns:
            The texts of all processes, in rank order.

        Raises:
            DistributedOperationException: If a process has left or does not come, or the store is gone.
        """
        self.count += 1
        self.last = f"operation {self.count} ({label})"
        self._monitor.watch()
        try:
            if self._gone:
                self._gone = False
                self.store.delete_key(f"left/{self.rank}")
            self._show_life()
            self.store.set(self._key(self.rank), text)
            self._wait_for_all()
            # Nobody deletes these before the next operation, at which all have read them.
            texts = [self.store.get(self._key(rank)).decode() for rank in range(self.world)]
            self._clean_up()
        except (RuntimeError, OSError) as error:
            raise DistributedOperationException(
                f"Process {self.rank}, in {self.last}, lost the store of the process group "
                f"({first_line(error)}). The process that hosts it, usually process 0, has ended or cannot "
                "be reached; see its output."
            ) from error
        return texts

    def fail(self, message: str) -> NoReturn:
        """Raise, but let the other processes read why first, in case that this one hosts the store.

        Raises:
            DistributedOperationException: Always.
        """
        with contextlib.suppress(RuntimeError, OSError):
            self._acknowledge()
            self._linger(self.count)
        raise DistributedOperationException(message)

    def first_time(self, topic: str) -> bool:
        """Return whether this is the first time that a topic comes up in this session."""
        new = topic not in self._noted
        self._noted.add(topic)
        return new

    def leave(self, reason: str) -> None:
        """Write for the others that this process takes part no longer; the next meeting takes it back.

        Args:
            reason: Why, as the end of a sentence.
        """
        self._monitor.stop()
        self._publish_left(reason)
        with contextlib.suppress(RuntimeError, OSError):
            self._linger(self.count + 1)  # for those who wait already

    def _show_life(self) -> None:
        if self._life is None:
            self._life = LifeLock()
            self.store.set(f"life/{self.rank}", self._life.name)

    def _publish_left(self, reason: str) -> None:
        if not self._gone:
            self._gone = True
            with contextlib.suppress(RuntimeError, OSError):
                when = f"after {self.last}" if self.last else "before any operation"
                self.store.set(f"left/{self.rank}", f"left {when}, because {reason}")

    def _notice_the_end(self) -> bool:
        if default_store() is self.base:
            return False
        self._publish_left(_DESTROYED)
        _forget(self)
        return True

    def _key(self, rank: int, count: int | None = None) -> str:
        return f"{count or self.count}/{rank}"

    def _missing(self, count: int | None = None) -> list[int]:
        return [rank for rank in range(self.world) if not self.store.check([self._key(rank, count)])]

    def _wait_for_all(self) -> None:
        wanted = [self._key(rank) for rank in range(self.world)]
        start = time.monotonic()
        look_at, warn_at = start + _LOOK_EVERY_S, start + WARN_AFTER_S
        look_for_life_at = start + _LOOK_FOR_LIFE_EVERY_S
        give_up_at = start + _timeout_s(self.base)
        pause = _PAUSES_S[0]
        while not self.store.check(wanted):
            now = time.monotonic()
            if now > look_for_life_at:
                self._note_ended()
                look_for_life_at = now + _LOOK_FOR_LIFE_EVERY_S
            if now > look_at:
                self._raise_if_left()
                look_at = now + _LOOK_EVERY_S
            if now > warn_at:
                # One warning for each wait.
                warn_at = float("inf")
                self._warn(now - start)
            if now > give_up_at:
                self._give_up(now - start)
            time.sleep(pause)
            # Short at first, as the others are usually about to come, and longer with time.
            pause = min(pause * 1.5, _PAUSES_S[1])

    def _note_ended(self) -> None:
        """Write for all that a process has left which could not do so itself."""
        for rank in self._missing():
            key = f"life/{rank}"
            if self.store.check([key]) and has_ended(self.store.get(key).decode()):
                self.store.set(f"left/{rank}", _ENDED)

    def _raise_if_left(self) -> None:
        missing = self._missing()
        left = [rank for rank in missing if self.store.check([f"left/{rank}"])]
        # It may have written its text and left between the two questions.
        left = [rank for rank in left if not self.store.check([self._key(rank)])]
        if left:
            notes = [f"  process {rank} {self.store.get(f'left/{rank}').decode()}" for rank in left]
            waits = f"Process {self.rank} waits in {self.last}, but not all others will come:"
            self.fail("\n".join([waits, *notes, "Every process must call the same operations."]))

    def _warn(self, waited_s: float) -> None:
        warn(
            f"Process {self.rank} has waited {waited_s:.0f} s in {self.last}.\n{self._where_missing()}",
            RuntimeWarning,
            about="process",
        )

    def _give_up(self, waited_s: float) -> None:
        self.fail(
            f"Process {self.rank} has waited {waited_s:.0f} s in {self.last}, which is the timeout of the "
            f"process group.\n{self._where_missing()}"
        )

    def _where_missing(self) -> str:
        missing = self._missing()
        numbers = {rank: self.store.add(f"ask/{rank}", 1) for rank in missing}
        until = time.monotonic() + ANSWER_S
        answers: dict[int, str] = {}
        while len(answers) < len(missing) and time.monotonic() < until:
            time.sleep(_PAUSES_S[1])
            for rank in missing:
                if self.store.check([f"where/{rank}"]):
                    number, text = json.loads(self.store.get(f"where/{rank}"))
                    if number >= numbers[rank]:
                        answers[rank] = text
        silent = "does not answer: it has not come to any operation yet, hangs outside Python, or was killed"
        return "\n".join(f"  process {rank} {answers.get(rank, silent)}" for rank in missing)

    def _clean_up(self) -> None:
        # All have come here, so all have read what was written for the operation before.
        for key in self._old:
            self.store.delete_key(key)
        self._old = [self._key(self.rank)]

    def _acknowledge(self) -> None:
        key = f"read/{self._key(self.rank)}"
        self.store.set(key, "")
        self._old.append(key)

    def _linger(self, count: int) -> None:
        """Let process 0, which may host the store, stay until those who wait for an operation know why."""
        until = time.monotonic() + (LINGER_S if self.rank == 0 else 0)
        while time.monotonic() < until:
            missing = self._missing(count)
            present = [rank for rank in range(1, self.world) if rank not in missing]
            # Who has written its text for this operation is still reading why it failed.
            if all(self.store.check([f"read/{self._key(rank, count)}"]) for rank in present):
                return
            time.sleep(_PAUSES_S[1])


_session: Session | None = None
_lock = threading.RLock()


def current_session(process: ProcessInfo) -> Session:
    """Return the session of the present process group, and begin one if there is none.

    Args:
        process: The facts of this process.

    Raises:
        RuntimeError: If there is no process group.
    """
    global _session
    store = default_store()
    if store is None:
        raise RuntimeError(
            f"Process {process.rank} of {process.world_size} has no process group: it was destroyed or never "
            "made."
        )
    with _lock:
        if _session is None or _session.base is not store:  # the old one's thread sees that it is over
            if _session is not None:
                _session.end()
            _session = Session(store, process)
            call_at_the_end(_exit)
        return _session


def call_at_the_end(function: Callable[[], None]) -> None:
    """Have a function called when this process ends, before what was registered earlier.

    Args:
        function: The function.
    """
    atexit.unregister(function)
    atexit.register(function)
    if multiprocessing.parent_process() is not None:
        # What multiprocessing forks (so do torch's and the notebook launcher) ends without atexit.
        multiprocessing.util.Finalize(None, function, exitpriority=0)


def leave(reason: str | None = None) -> None:
    """Write for the other processes that this one takes part in no more collectives.

    It happens by itself when the process ends; call it where a process stops early but lives on. Nothing
    happens outside debug mode. A later collective takes it back.

    Args:
        reason: Why, as the end of a sentence; by default the exception that ended the script, or its end.
    """
    session = _session
    if session is not None:
        session.leave(reason or why_exiting())


def _exit() -> None:
    global _session
    leave()
    if _session is not None:
        _session.end()
    _session = None


def _forget(session: Session) -> None:
    """Drop the reference to the store of a process group that was destroyed."""
    global _session
    with _lock:
        session.end()
        if _session is session:
            _session = None


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text."""
    return str(error).partition("\n")[0]


def default_store() -> Store | None:
    """Return the store of the default process group (torch has no public call for it)."""
    if not dist.is_initialized():
        return None
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def _timeout_s(store: Any) -> float:
    # The process group hands its own timeout to the store, unless the user gave a store.
    return float(store.timeout.total_seconds())


def prefixed(prefix: str, store: Store) -> Store:
    """Return a store whose keys have a prefix, so that they do not meet those of others.

    Args:
        prefix: The prefix.
        store: The store that holds them.
    """
    prefixed: Store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    return prefixed
