"""Exchange of texts between processes through the process group's store: the basis of debug mode.

A `Session` belongs to one process group. For each operation every process writes one text under the
operation's number and waits until all have written theirs. It polls, and never blocks in the store, so that
it can see which ranks have left, and ask where the missing ones are. Keys are deleted one operation later.
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
"""After waiting this long for other ranks (seconds), one warning shows where they are."""

ANSWER_S = 2.0
"""How long to wait (seconds) for another process to report where it is."""

LINGER_S = 2.0
"""How long process 0, which may host the store, stays (seconds) so that others can read why it leaves."""

_DESTROYED = "its process group was destroyed"
_ENDED = "ended without an exception: by os._exit or a signal, such as that of the system's memory killer"
_CHECK_LEFT_EVERY_S = 0.05
_CHECK_ALIVE_EVERY_S = 1.0
_PAUSES_S = (0.0002, 0.02)  # between two polls: at first, at most


class DistributedOperationException(Exception):
    """The processes disagree: collectives do not match, or a rank does not come; or their models or random
    generators differ.
    """


class Session:
    """This process's end of the exchanges of one process group.

    Args:
        base: The process group's store.
        process: This process.
    """

    def __init__(self, base: Store, process: ProcessInfo) -> None:
        self.base = base
        self.rank = process.rank
        self.world = process.world_size
        self.count = 0
        self.last = ""
        self._has_left = False
        self._old: list[str] = []
        self._seen: set[str] = set()
        self._life: LifeLock | None = None
        # A prefix, so that keys do not collide with torch's in the same store.
        self.store = prefixed("accel/check_collectives", base)
        self._monitor = Monitor(self.store, self.rank, self._detect_destroyed_group)

    def begin(self) -> None:
        """Be ready to report where this process is, even before its first exchange."""
        self._publish_life_lock()
        self._monitor.watch()

    def end(self) -> None:
        """Release the session's resources, when the process or its group ends."""
        if self._life is not None:
            self._life.release()
            self._life = None

    def exchange(self, text: str, label: str) -> list[str]:
        """Write this process's text for the next operation, and wait for those of the other ranks.

        Args:
            text: The text for the other ranks.
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
            if self._has_left:
                self._has_left = False
                self.store.delete_key(f"left/{self.rank}")
            self._publish_life_lock()
            self.store.set(self._key(self.rank), text)
            self._wait_for_all()
            # These are deleted at the next operation, when all ranks have read them.
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
        """Raise, but let the other processes read the reason first, in case this one hosts the store.

        Raises:
            DistributedOperationException: Always.
        """
        with contextlib.suppress(RuntimeError, OSError):
            self._acknowledge()
            self._linger(self.count)
        raise DistributedOperationException(message)

    def first_time(self, topic: str) -> bool:
        """Return whether a topic is new in this session."""
        new = topic not in self._seen
        self._seen.add(topic)
        return new

    def leave(self, reason: str) -> None:
        """Tell the other ranks that this one has left; undone by its next exchange.

        Args:
            reason: Why, as the end of a sentence.
        """
        self._monitor.stop()
        self._publish_left(reason)
        with contextlib.suppress(RuntimeError, OSError):
            self._linger(self.count + 1)  # for ranks that are waiting already

    def _publish_life_lock(self) -> None:
        if self._life is None:
            self._life = LifeLock()
            self.store.set(f"life/{self.rank}", self._life.name)

    def _publish_left(self, reason: str) -> None:
        if not self._has_left:
            self._has_left = True
            with contextlib.suppress(RuntimeError, OSError):
                when = f"after {self.last}" if self.last else "before any operation"
                self.store.set(f"left/{self.rank}", f"left {when}, because {reason}")

    def _detect_destroyed_group(self) -> bool:
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
        check_left_at, warn_at = start + _CHECK_LEFT_EVERY_S, start + WARN_AFTER_S
        check_alive_at = start + _CHECK_ALIVE_EVERY_S
        give_up_at = start + _timeout_s(self.base)
        pause = _PAUSES_S[0]
        while not self.store.check(wanted):
            now = time.monotonic()
            if now > check_alive_at:
                self._record_ended()
                check_alive_at = now + _CHECK_ALIVE_EVERY_S
            if now > check_left_at:
                self._raise_if_left()
                check_left_at = now + _CHECK_LEFT_EVERY_S
            if now > warn_at:
                # One warning per wait.
                warn_at = float("inf")
                self._warn(now - start)
            if now > give_up_at:
                self._give_up(now - start)
            time.sleep(pause)
            # Short at first, as the others usually arrive soon, then longer.
            pause = min(pause * 1.5, _PAUSES_S[1])

    def _record_ended(self) -> None:
        """Record for all ranks that a process has ended which could not do so itself."""
        for rank in self._missing():
            key = f"life/{rank}"
            if self.store.check([key]) and has_ended(self.store.get(key).decode()):
                self.store.set(f"left/{rank}", _ENDED)

    def _raise_if_left(self) -> None:
        missing = self._missing()
        left = [rank for rank in missing if self.store.check([f"left/{rank}"])]
        # It may have written its text and left between the two checks.
        left = [rank for rank in left if not self.store.check([self._key(rank)])]
        if left:
            notes = [f"  process {rank} {self.store.get(f'left/{rank}').decode()}" for rank in left]
            waits = f"Process {self.rank} waits in {self.last}, but not all others will come:"
            self.fail("\n".join([waits, *notes, "Every process must call the same operations."]))

    def _warn(self, waited_s: float) -> None:
        warn(
            f"Process {self.rank} has waited {waited_s:.0f} s in {self.last}.\n{self._locate_missing()}",
            RuntimeWarning,
            about="process",
        )

    def _give_up(self, waited_s: float) -> None:
        self.fail(
            f"Process {self.rank} has waited {waited_s:.0f} s in {self.last}, which is the timeout of the "
            f"process group.\n{self._locate_missing()}"
        )

    def _locate_missing(self) -> str:
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
        # All ranks are here, so all have read the texts of the previous operation.
        for key in self._old:
            self.store.delete_key(key)
        self._old = [self._key(self.rank)]

    def _acknowledge(self) -> None:
        key = f"read/{self._key(self.rank)}"
        self.store.set(key, "")
        self._old.append(key)

    def _linger(self, count: int) -> None:
        """Make process 0, which may host the store, stay until the waiting ranks know the reason."""
        until = time.monotonic() + (LINGER_S if self.rank == 0 else 0)
        while time.monotonic() < until:
            missing = self._missing(count)
            arrived = [rank for rank in range(1, self.world) if rank not in missing]
            # A rank that has written its text for this operation is still reading why it failed.
            if all(self.store.check([f"read/{self._key(rank, count)}"]) for rank in arrived):
                return
            time.sleep(_PAUSES_S[1])


_session: Session | None = None
_lock = threading.RLock()


def current_session(process: ProcessInfo) -> Session:
    """Return the session of the current process group; one is started if there is none.

    Args:
        process: This process.

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
        if _session is None or _session.base is not store:  # the old one's thread notices that
            if _session is not None:
                _session.end()
            _session = Session(store, process)
            call_at_exit(_exit)
        return _session


def call_at_exit(function: Callable[[], None]) -> None:
    """Register a function to run when this process ends, before functions registered previously.

    Args:
        function: The function.
    """
    atexit.unregister(function)
    atexit.register(function)
    if multiprocessing.parent_process() is not None:
        # Processes that multiprocessing forks (as torch and the notebook launcher do) end without atexit.
        multiprocessing.util.Finalize(None, function, exitpriority=0)


def leave(reason: str | None = None) -> None:
    """Tell the other ranks that this one participates in no more collectives.

    This happens automatically when the process ends; call it where a process stops early but lives on. A
    no-op outside debug mode. A later collective undoes it.

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
    # The process group passes its timeout to the store, unless the user created the store.
    return float(store.timeout.total_seconds())


def prefixed(prefix: str, store: Store) -> Store:
    """Return a store whose keys have a prefix, so that they do not collide with others.

    Args:
        prefix: The prefix.
        store: The underlying store.
    """
    prefixed: Store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    return prefixed
