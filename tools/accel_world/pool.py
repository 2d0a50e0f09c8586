"""The workers of one pytest process, started when first needed and kept until its end."""

from __future__ import annotations

import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accel_world.exchange import exchange
from accel_world.functions import name_function
from accel_world.messages import Call
from accel_world.ports import lease_port
from accel_world.process import Starter, Worker
from accel_world.report import Outcome, WorldFailure, describe_failure

__all__ = ["MAX_SIZE", "World"]

MAX_SIZE = 8
GRACE_S = 2.0  # what the other ranks get once one has failed
LOOK_S = 0.2  # how often to look for a worker that died while its socket stayed open


class World:
    """The value of the `world` fixture: runs functions on a persistent pool of gloo workers."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._starter: Starter | None = None
        self._workers: dict[int, Worker] = {}
        self._started = 0
        self._runs = 0

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        size: int = 2,
        timeout_s: float = 90,
        env: Mapping[str, str | None] | None = None,
        init: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` as every rank of a fresh world.

        Args:
            fn: A function at the top level of a module, found by its file and name in the workers.
            *args: Its arguments, pickled.
            size: Number of ranks, 1 to 8.
            timeout_s: Seconds after which a rank that has not come back is a failure.
            env: Environment variables for this run; None removes one.
            init: Whether to initialise a gloo process group before `fn`.
            **kwargs: Its keyword arguments, pickled.

        Returns:
            The return values in the order of the ranks.

        Raises:
            WorldFailure: If a rank raised, died or got stuck; it has every rank's traceback.
            TypeError: If `fn` is not at the top level of a module, or an argument cannot be pickled.
            ValueError: If `size` is out of range.
        """
        __tracebackhide__ = True
        if not 1 <= size <= MAX_SIZE:
            raise ValueError(f"size must be from 1 to {MAX_SIZE}, got {size}")
        name = name_function(fn)
        arguments = _pickle_arguments(name, args, kwargs)
        workers = self._ready_workers(size)
        self._runs += 1
        assert self._folder is not None
        store_file = self._folder / f"store-{self._runs}"
        with lease_port() as port:
            calls = [
                Call(
                    function=name,
                    arguments=arguments,
                    rank=rank,
                    size=size,
                    environment=_place(rank, size, port) | dict(env or {}),
                    store_file=str(store_file),
                    timeout_s=timeout_s,
                    init=init,
                    warning_filters=list(warnings.filters),
                )
                for rank in range(size)
            ]
            try:
                outcomes = exchange(workers, calls, timeout_s)
            except BaseException:  # an interrupt or pytest-timeout: their state is unknown now
                self._discard(range(size))
                raise
            finally:
                store_file.unlink(missing_ok=True)
        return self._results(f"world.run({name}, size={size})", outcomes)

    def warm_up(self) -> None:
        """Let the starter import torch in the background, because a world will be needed."""
        if self._folder is None or self._starter is None:
            self._folder = self._folder or Path(tempfile.mkdtemp(prefix="accel-world-"))
            self._starter = Starter(self._folder)

    def close(self) -> None:
        """End every process."""
        if self._starter is not None:
            self._starter.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _ready_workers(self, size: int) -> list[Worker]:
        self.warm_up()
        assert self._folder is not None
        assert self._starter is not None
        for rank in range(size):
            if rank in self._workers and not self._workers[rank].alive:
                self._discard([rank])  # it died between two runs
            if rank not in self._workers:
                self._started += 1
                self._workers[rank] = Worker(self._starter, self._folder, self._started)
        return [self._workers[rank] for rank in range(size)]

    def _discard(self, ranks: Any) -> None:
        for rank in ranks:
            self._workers.pop(rank).kill()

    def _results(self, title: str, outcomes: list[Outcome]) -> list[Any]:
        __tracebackhide__ = True
        for rank, outcome in enumerate(outcomes):
            if outcome.output:
                print("".join(f"[rank {rank}] {line}\n" for line in outcome.output.splitlines()), end="")
            if outcome.kind in ("died", "stuck"):
                self._discard([rank])
        if any(outcome.kind != "returned" for outcome in outcomes):
            raise WorldFailure(describe_failure(title, outcomes))
        return [pickle.loads(outcome.result) for outcome in outcomes]


def _place(rank: int, size: int, port: int) -> dict[str, str | None]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }


def _pickle_arguments(name: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((args, kwargs))
    except Exception as error:
        raise TypeError(
            f"world.run sends the arguments of {name} to other processes, and they cannot be pickled: "
            f"{error}. Pass plain values or tensors, and build the rest inside the function."
        ) from error
