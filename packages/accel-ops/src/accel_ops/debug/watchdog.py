"""A thread that detects when this process, or another one, waits too long in a collective.

It samples the training thread several times within the limit: whether it has moved, and how many operations
the process groups have started, which they count themselves. So nothing is added to a collective or to a
step. A process that has not moved for the limit asks all others, through the process group's store, for their
status; each answers and reads the other answers. If an operation is stuck, one process of each machine
reports it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING

from accel_ops.debug.hang_report import find_stuck, report
from accel_ops.debug.progress import Sampler, Status, group_ranks
from accel_ops.debug.stack import failed_in_collective, failure_place, why_exiting
from accel_ops.debug.store import call_at_exit, default_store, first_line, prefixed
from accel_ops.debug.timeout_store import TimeoutStore
from accel_state.process import failure
from accel_state.process.info import ProcessInfo

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ANSWER_S = 5.0
"""How long to wait (seconds) for the status of the other processes."""

LINGER_S = 2.0
"""How long process 0, which may host the store, stays (seconds) so that others can read why it leaves."""

_SAMPLES = 4  # of the training thread, within the limit
_EVERY_S = (0.05, 0.5)  # between two samples: at least, at most
_PAUSE_S = 0.02
_STORE_S = 1.0  # for one call of a healthy store
_STORE_LOST = """
  The others could not be asked: the store of the process group does not reply ({reason}).
  The process that hosts it, usually process 0, is stopped, hangs outside Python, or has ended."""


class StuckCollectiveError(RuntimeError):
    """A watchdog has ended its process: an operation waited longer than the limit."""


class Watchdog:
    """Reports an operation that waits longer than a limit, once on each machine.

    With one process it is a no-op.

    Args:
        process: This process.
        timeout_s: The limit, in seconds.
        abort: End every process after the report, with exit code 1.

    Raises:
        ValueError: If the limit is not a number of seconds above 0.
        RuntimeError: If there are several processes, and no process group.
    """

    def __init__(self, process: ProcessInfo, timeout_s: float, abort: bool = False) -> None:
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s is {timeout_s!r}; it takes a number of seconds above 0.")
        self.rank = process.rank
        self.world = process.world_size
        self.timeout_s = timeout_s
        self.abort = abort
        self._pid = os.getpid()
        self._every_s = min(max(timeout_s / _SAMPLES, _EVERY_S[0]), _EVERY_S[1])
        self._sampler = Sampler(threading.get_ident())
        self._machine = process.node_rank
        self._explains: bool | None = None  # whether this process reports a failed collective
        self._groups: dict[str, list[int]] = {}
        self._ask_after_s = timeout_s
        self._reported: set[tuple[str, int, bool]] = set()
        self._number = 0  # counts the watchdogs of this process in this process group
        self._round = 0
        self._left: dict[int, Status] = {}  # processes that have left; process 0 may have hosted the store
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        if self.world > 1:
            self._start()

    @property
    def is_running(self) -> bool:
        """Whether it is running: not with one process, nor after stop() or without its process group."""
        return (
            self._thread is not None and os.getpid() == self._pid
        )  # a fork does not have its parent's threads

    def stop(self, reason: str = "its watchdog was stopped") -> None:
        """Stop watching, and tell the other ranks that this one has left.

        Args:
            reason: Why, as the end of a sentence.
        """
        if self.is_running:
            self._end_thread()
            self._leave(reason)

    # The thread

    def _start(self) -> None:
        base = default_store()
        if base is None:
            raise RuntimeError(
                f"Process {self.rank} of {self.world} has no process group: make the PartialState or the "
                "Accelerator first."
            )
        self._base = base
        # A prefix, so that keys do not collide with those of torch and of debug mode in the same store.
        self._store = TimeoutStore(prefixed("accel/watchdog", base))
        with contextlib.suppress(RuntimeError, OSError):
            self._number = self._store.call(lambda store: store.add(f"started/{self.rank}", 1), _STORE_S)
        self._thread = threading.Thread(target=self._run, name="accel-watchdog", daemon=True)
        self._thread.start()
        call_at_exit(self._exit)

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._every_s):
                if default_store() is not self._base:
                    self._leave("its process group was destroyed")
                    return
                self._look()
        except Exception as error:  # of the watchdog itself, which must not end training
            self._write(
                "stops because of an internal error, and training continues. Please report it.\n"
                # Without the first line, by which the launcher recognises a failing worker.
                + textwrap.indent(traceback.format_exc().partition("\n")[2].rstrip(), "  ")
            )
            self._leave(f"its watchdog stopped by {type(error).__name__}")

    def _look(self) -> None:
        status = self._sampler.take()
        if status.waited_s < self.timeout_s:
            self._ask_after_s = self.timeout_s
        may_ask = status.waited_s >= self._ask_after_s
        if may_ask:
            self._ask_after_s = 2 * status.waited_s
        # A store that process 0 may have hosted is not called unless it is needed.
        elif 0 in self._left and not (status.operation and status.waited_s >= self.timeout_s / 2):
            return
        try:
            question = self._store.call(lambda store: self._poll(store, may_ask), _STORE_S)
            if question > self._round:
                self._round = question
                self._report(self._query_all(question, self._sampler.take()))
        except (RuntimeError, OSError) as error:  # gone, or no answer in time
            if may_ask:
                self._report(self._last_statuses(status), _STORE_LOST.format(reason=first_line(error)))

    def _report(self, statuses: Mapping[int, Status | None], lost: str = "") -> None:
        """Report stuck operations that have not been reported yet.

        Args:
            statuses: The status of each process.
            lost: Why the others could not be asked.
        """
        self._groups.update(group_ranks())
        stuck = find_stuck(statuses, self._groups, self.timeout_s)
        # Once per operation, and once more if all have arrived, but not at the same one.
        answers = {(item.group, item.number, bool(item.missing)) for item in stuck}
        if answers <= self._reported:
            return
        self._reported |= answers
        headline = f"an operation has waited for longer than {self.timeout_s:g} s."
        accounts = report(stuck, statuses, self._groups, could_ask=not lost)
        if lost or self._is_first(f"stuck {self._round}"):
            end = "\n  Every process ends with exit code 1, because abort is on." if self.abort else ""
            self._write(f"{headline}\n{accounts}{lost}{end}")
        if self.abort:
            arrival = accounts.partition("\n")[0].strip()
            answering = [rank for rank, status in statuses.items() if status and not status.left]
            self._abort(f"{headline} {arrival}", answering)

    def _write(self, text: str) -> None:
        text = f"Watchdog, process {self.rank} of {self.world}: {text}\n"
        # In one write, as other processes write to the same terminal.
        sys.stderr.write(text)
        sys.stderr.flush()

    def _abort(self, reason: str, answering: list[int]) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            self._store.call(lambda store: self._wait_until_all_reported(store, answering), ANSWER_S)
        failure.record(StuckCollectiveError(reason))
        sys.stdout.flush()
        # The training thread hangs in C++, where no exception reaches it.
        os._exit(1)

    def _query_all(self, number: int, local_status: Status) -> dict[int, Status | None]:
        timeout_s = ANSWER_S + _STORE_S
        return self._store.call(lambda store: self._exchange(store, number, local_status), timeout_s)

    def _last_statuses(self, local_status: Status) -> dict[int, Status | None]:
        """Return the statuses that this process has when the others cannot be asked."""
        return {**dict.fromkeys(range(self.world)), **self._left, self.rank: local_status}

    def _is_first(self, report: str) -> bool:
        """Return whether this machine's first report comes from this process; True if that is unknown."""
        try:
            return self._store.call(lambda store: self._claim(store, report), _STORE_S)
        except (RuntimeError, OSError):
            return True

    # Store calls; these run in the store's thread

    def _claim(self, store: Store, report: str) -> bool:
        return bool(store.add(self._key(f"writes {report}", self._machine), 1) == 1)

    def _key(self, name: str, number: int | None = None) -> str:
        """Return the key of this process, of another rank, or of a question's number."""
        return f"{self._number}/{name}/{self.rank if number is None else number}"

    def _poll(self, store: Store, may_ask: bool) -> int:
        """Return the number of the next question, if there is one, else of the last.

        Args:
            store: The store.
            may_ask: Whether this process asks, if no other has.
        """
        if 0 not in self._left and store.check([self._key("farewell", 0)]):
            notes = json.loads(store.get(self._key("farewell", 0)))
            self._left.update({int(rank): Status.from_text(note) for rank, note in notes.items()})
            # Now: the store may be gone when a collective fails.
            self._explains = self._claim(store, "failure")
            store.set(self._key("read"), "")
        # Questions are numbered from 1; two processes that ask at the same time ask the same one.
        following = self._round + 1
        if may_ask:
            store.set(self._key("asked", following), "")
            return following
        return following if store.check([self._key("asked", following)]) else self._round

    def _exchange(self, store: Store, number: int, local_status: Status) -> dict[int, Status | None]:
        """Answer a question, and read the other ranks' answers."""
        store.set(self._key("status"), f"{number} {local_status.to_text()}")
        answers: dict[int, Status | None] = {**dict.fromkeys(range(self.world)), self.rank: local_status}
        until = time.monotonic() + ANSWER_S
        while (missing := [rank for rank, status in answers.items() if status is None]) and (
            time.monotonic() < until
        ):
            for rank, text in zip(missing, self._texts(store, "status", missing), strict=True):
                # Questions are numbered: an old answer shows where the process was.
                answered, _, status = text.partition(" ")
                if status and int(answered) >= number:
                    answers[rank] = Status.from_text(status)
                elif store.check([self._key("left", rank)]):
                    answers[rank] = self._left[rank] = Status.from_text(store.get(self._key("left", rank)))
            time.sleep(_PAUSE_S)
        return answers

    def _texts(self, store: Store, name: str, ranks: list[int]) -> list[str]:
        keys = [self._key(name, rank) for rank in ranks]
        # In two messages if all have answered: each of N processes reads N answers.
        if store.has_extended_api() and store.check(keys):  # type: ignore[attr-defined]
            return [text.decode() for text in store.multi_get(keys)]
        return [store.get(key).decode() if store.check([key]) else "" for key in keys]

    def _wait_until_all_reported(self, store: Store, ranks: list[int]) -> None:
        """Wait, as the launcher may end all processes once one has ended."""
        self._wait_for(store, "reported", ranks)
        if self.rank == 0:  # which may host the store
            self._wait_for(store, "ending", ranks)
        else:
            store.set(self._key("ending"), "")

    def _wait_for(self, store: Store, name: str, ranks: list[int]) -> None:
        store.set(self._key(name), "")
        until = time.monotonic() + ANSWER_S
        while not store.check([self._key(name, rank) for rank in ranks]) and time.monotonic() < until:
            time.sleep(_PAUSE_S)

    def _wait_until_read(self, store: Store) -> None:
        """Stay, as process 0 may host the store, until all others know which ranks have left."""
        notes = {rank: status.to_text() for rank, status in self._left.items()}
        store.set(self._key("farewell"), json.dumps(notes))
        others = list(range(1, self.world))
        until = time.monotonic() + LINGER_S
        while others and time.monotonic() < until:
            others = [rank for rank in others if not self._has_read_or_left(store, rank)]
            time.sleep(_PAUSE_S if others else 0)

    def _has_read_or_left(self, store: Store, rank: int) -> bool:
        return bool(store.check([self._key("read", rank)]) or store.check([self._key("left", rank)]))

    # The end

    def _end_thread(self) -> None:
        self._stopping.set()
        thread = self._thread  # None if it has just ended by itself
        if thread is not None:
            thread.join(ANSWER_S + 2 * _STORE_S)

    def _leave(self, reason: str, place: str = "") -> None:
        self._thread = None
        atexit.unregister(self._exit)
        note = self._sampler.last(reason, place)
        if 0 not in self._left:
            self._left[self.rank] = note
            with contextlib.suppress(RuntimeError, OSError):
                text = note.to_text()
                self._store.call(lambda store: store.set(self._key("left"), text), _STORE_S)
                if self.rank == 0:
                    self._store.call(self._wait_until_read, LINGER_S + _STORE_S)
        self._store.close()

    def _exit(self) -> None:
        if not self.is_running:
            return
        self._end_thread()
        reason, place = why_exiting(), failure_place()
        if failed_in_collective():
            self._explain_failure(self._sampler.last(reason, place))
        self._leave(reason, place)

    def _explain_failure(self, local_status: Status) -> None:
        """Report where all ranks are after a failed collective: perhaps one has left."""
        lost = ""
        try:
            number = self._store.call(lambda store: self._poll(store, may_ask=True), _STORE_S)
            statuses = (
                self._last_statuses(local_status)
                if 0 in self._left
                else self._query_all(number, local_status)
            )
        except (RuntimeError, OSError) as error:
            statuses, lost = self._last_statuses(local_status), _STORE_LOST.format(reason=first_line(error))
        if self._explains is None:
            self._explains = self._is_first("failure")
        if not self._explains:
            return
        self._groups.update(group_ranks())
        question = not lost and 0 not in self._left
        self._write(
            f"a collective failed here.\n{report([], statuses, self._groups, could_ask=question)}{lost}"
        )
