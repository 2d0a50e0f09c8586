"""Reports of all ranks on the main process, through the store: no rank waits for one that has ended."""

from __future__ import annotations

import json
import platform
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from accel_ops.debug.store import default_store
from accel_ops.memory import peak_memory

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo


def describe_rank(process: ProcessInfo) -> dict[str, Any]:
    """Return which process a report is from, where it runs, and the most memory that it had, in bytes."""
    of_process = {"rank": process.rank, "host": platform.node(), "device": str(process.device)}
    return of_process | {"peak_memory": peak_memory()}


class RankReports:
    """Sends values of this rank to the main process, which receives those of all ranks.

    Not by collectives: where a rank has left by an exception, these would pair with other ones.

    Args:
        process: This process.
        topic: What the reports are about. The n-th object of a topic is the n-th one on every other rank.
    """

    def __init__(self, process: ProcessInfo, topic: str) -> None:
        self._process = process
        self._store = default_store() if process.world_size > 1 else None
        number = 0
        if self._store is not None:
            # A key per rank, so that no rank waits for another one here.
            number = self._store.add(f"accel/{topic}/starts/{process.rank}", 1)
        self._prefix = f"accel/{topic}/{number}"
        self._local: dict[str, Any] = {}  # the main process's reports, by name

    def send(self, name: str, report: Any) -> None:
        """Send a report.

        Args:
            name: Its name, which only the reports of other ranks share.
            report: Values that JSON has.
        """
        if self._process.is_main:
            self._local[name] = report
        elif self._store is not None:
            try:
                self._store.set(f"{self._prefix}/{name}/{self._process.rank}", json.dumps(report))
            except RuntimeError:  # the process that hosts the store has ended
                self._store = None

    def receive(self, name: str, timeout_s: float = 0.0, *, partial: bool = False) -> dict[int, Any] | None:
        """Return the reports of all ranks, by rank; on the main process alone, after it has sent its own.

        Args:
            name: Their name.
            timeout_s: How long to wait for the other ranks, in seconds.
            partial: Also return the reports that came if some did not; otherwise None then.
        """
        store, others = self._store, range(1, self._process.world_size)
        reports = {0: self._local[name]}
        if store is not None:
            keys = {rank: f"{self._prefix}/{name}/{rank}" for rank in others}
            try:
                if timeout_s:
                    store.wait(list(keys.values()), timedelta(seconds=timeout_s))
            except RuntimeError:  # some did not come
                pass
            if not (partial or store.check(list(keys.values()))):
                return None
            for rank, key in keys.items():
                if store.check([key]):
                    reports[rank] = json.loads(store.get(key))
                    store.delete_key(key)
        del self._local[name]
        return reports
