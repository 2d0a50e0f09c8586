"""Start the workers on a Ray cluster: Ray places them, this process looks after them.

An actor per worker runs it as a process (see `accel_launch.ray_worker`). Its output and its end come back
through Ray, and are supervised as those of workers on this machine are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accel_launch.environment import worker_environment
from accel_launch.errors import LaunchError, NotAvailableError
from accel_launch.output import Channel, Output
from accel_launch.ray_worker import Place, RayWorker
from accel_launch.signals import SignalPipe
from accel_launch.starters import Prepared
from accel_launch.supervised import Supervised
from accel_launch.supervisor import Member, Run
from accel_launch.torchrun import rendezvous_timeout
from accel_state import env
from accel_state.env import VARIABLES, CPUInformation

if TYPE_CHECKING:
    from accel_launch.plan import Plan

__all__ = ["prepare", "run"]

_NOTE_AFTER_S = 5.0
_THREADS = 8  # of an actor: one runs the worker, the others send it signals
_UNREAD = 16  # chunks of output; a worker that writes faster than they are read waits


def prepare(plan: Plan, base: Mapping[str, str]) -> Prepared:
    """Return what rank 0 runs, as far as it is known before Ray has placed it.

    Args:
        plan: What to start.
        base: This process's environment.
    """
    environ = dict(plan.environ)
    count = "one process per GPU of the cluster"
    if plan.settings.given("num_processes"):
        total = plan.settings.value("num_processes")
        environ |= {"RANK": "0", "WORLD_SIZE": str(total), "ACCELERATE_NUM_PROCESSES": str(total)}
        count = f"{total} processes"
    return Prepared(
        plan.command,
        environ,
        f"{count}, placed by Ray, which decides the address and the local ranks; rank 0:",
    )


def run(plan: Plan) -> int:
    """Run the workers to their end.

    Args:
        plan: What to start.

    Returns:
        As `accel_launch.local.run_local`.

    Raises:
        NotAvailableError: If Ray is not installed.
        LaunchError: If there is no cluster, or it has no room for the workers in time.
    """
    ray = _import_ray()
    with _connected(ray):
        seats = _seats(ray, plan)
        address, port = seats[0].place.address, _reserve(ray, plan, seats[0])
        with SignalPipe() as signals:
            state = Run(plan, Output.of(plan, captured=True))
            try:
                for seat in seats:
                    state.members.append(_start(ray, state, seat, address, port, signals.wake))
                state.loop(signals, lambda pid: None)
            finally:
                for member in state.members:
                    member.worker.end()
            code = state.conclude()
    state.output.finish()
    return code


def _import_ray() -> Any:
    try:
        return import_module("ray")
    except ImportError as error:
        raise NotAvailableError(
            f"--launcher ray needs Ray: {error}. Install it with: pip install 'accel-launch[ray]'."
        ) from None


@contextlib.contextmanager
def _connected(ray: Any) -> Iterator[None]:
    """Connect to the cluster of RAY_ADDRESS or of this machine; a new one of this machine alone if none."""
    if ray.is_initialized():  # a program of Ray's calls the launcher
        yield
        return
    try:
        ray.init(log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        address = env.raw("RAY_ADDRESS")
        where = f" at RAY_ADDRESS={address}" if address else ""
        raise LaunchError(
            f"There is no Ray cluster{where}: {error}. Start one with `ray start --head`."
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


@dataclass(frozen=True)
class _Seat:
    """A worker's actor, and its place among the others.

    Args:
        actor: The handle.
        place: Where it is.
        gpus: The GPUs of all workers of its machine, in the order of their local ranks.
        information: Its rank and the number of workers, in all and on its machine.
        machine: The machine's rank and the number of machines.
    """

    actor: Any
    place: Place
    gpus: tuple[str, ...]
    information: CPUInformation
    machine: tuple[int, int]


def _seats(ray: Any, plan: Plan) -> list[_Seat]:
    """Let Ray place the actors; those of one machine get ranks that follow each other."""
    bundle, total = _resources(ray, plan)
    group = _room(ray, plan, bundle, total)
    strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    remote = ray.remote(RayWorker)
    actors = [
        remote.options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_concurrency=_THREADS,
            scheduling_strategy=strategy(group, placement_group_bundle_index=index),
        ).remote()
        for index in range(total)
    ]
    try:
        places: list[Place] = ray.get([actor.place.remote() for actor in actors])
    except ray.exceptions.RayError as error:
        raise LaunchError(
            f"Ray could not start the workers: {error}\nEach machine needs accel-launch in this version."
        ) from None
    nodes = list(dict.fromkeys(place.node for place in places))
    seats: list[_Seat] = []
    for index, node in enumerate(nodes):
        here = [(actor, place) for actor, place in zip(actors, places, strict=True) if place.node == node]
        gpus = tuple(gpu for _, place in here for gpu in place.gpus)
        for local, (actor, place) in enumerate(here):
            information = CPUInformation(len(seats), total, local, len(here))
            seats.append(_Seat(actor, place, gpus, information, (index, len(nodes))))
    return seats


def _resources(ray: Any, plan: Plan) -> tuple[dict[str, float], int]:
    """Return what each worker takes, and the number of workers."""
    value, cluster = plan.settings.value, ray.cluster_resources()
    gpus = 0 if value("cpu") else int(cluster.get("GPU", 0))
    bundle: dict[str, float] = {"CPU": value("num_cpu_threads_per_process") or 1}
    if gpus:
        bundle["GPU"] = 1
    total = value("num_processes") if plan.settings.given("num_processes") else max(gpus, 1)
    return bundle, total


def _room(ray: Any, plan: Plan, bundle: dict[str, float], total: int) -> Any:
    """Wait until Ray has set the workers' resources apart, all at once; say what is waited for."""
    timeout_s = rendezvous_timeout(plan)
    group = import_module("ray.util.placement_group").placement_group([bundle] * total, strategy="PACK")
    ready = group.ready()
    if ray.wait([ready], timeout=min(_NOTE_AFTER_S, timeout_s))[0]:
        return group
    each = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    has = ", ".join(f"{ray.cluster_resources().get(name, 0):g} {name}" for name in bundle)
    wanted = f"{total} workers of {each}; the cluster has {has} in all"
    if timeout_s > _NOTE_AFTER_S:
        print(f"accel launch: waiting up to {timeout_s:g} s for {wanted}", file=sys.stderr, flush=True)
        if ray.wait([ready], timeout=timeout_s - _NOTE_AFTER_S)[0]:
            return group
    raise LaunchError(
        f"Ray had no room within {timeout_s:g} s for {wanted}. Give fewer --num_processes, or wait "
        "longer with --rdzv_conf timeout=SECONDS."
    )


def _reserve(ray: Any, plan: Plan, first: _Seat) -> int:
    """Reserve the port of rank 0 on its machine."""
    port = plan.settings["main_process_port"]
    try:
        return int(ray.get(first.actor.reserve.remote(port.value, port.detail if port.given else "")))
    except ray.exceptions.RayTaskError as error:
        raise LaunchError(str(error.cause)) from None


def _start(ray: Any, state: Run, seat: _Seat, address: str, port: int, wake: Callable[[], None]) -> Member:
    rank = seat.information.rank
    environ = state.output.environment(
        worker_environment(state.plan.environ, seat.information, address, port, seat.machine)
    )
    if seat.gpus:
        # All GPUs of the run on this machine, as on any: a worker takes the one of its local rank.
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(seat.gpus)
    base = env.snapshot()
    changes = {name: text for name, text in environ.items() if name in VARIABLES or base.get(name) != text}
    channel = state.output.open(rank)
    events = seat.actor.run.options(
        num_returns="streaming", _generator_backpressure_num_objects=_UNREAD
    ).remote(
        list(state.plan.command),
        changes,
        os.getcwd(),
        sys.executable,
        seat.place.address if seat.machine[1] > 1 else None,
    )
    worker = _Remote(ray, rank, seat)
    threading.Thread(target=worker.follow, args=(events, channel, wake), daemon=True).start()
    return Member(worker, channel.streams)


class _Remote(Supervised):
    """A worker that an actor runs."""

    pid = 0  # on another machine

    def __init__(self, ray: Any, rank: int, seat: _Seat) -> None:
        super().__init__(rank, seat.place.host)
        self._ray, self._actor = ray, seat.actor
        self._ended: int | None = None
        self._left = False

    def follow(self, events: Any, channel: Channel, wake: Callable[[], None]) -> None:
        """Pass on what the actor tells; for a thread of its own.

        Args:
            events: The references of its events, as they come.
            channel: The worker's streams.
            wake: Called after an end.
        """
        descriptors = {"1": channel.stdout, "2": channel.stderr}
        try:
            for reference in events:
                kind, value = self._ray.get(reference)
                if kind == "end":
                    self._ended = value
                    wake()
                else:
                    _write(descriptors[kind], value)
        except self._ray.exceptions.RayError as error:  # the machine, or the actor, is gone
            if self._ended is None:
                _write(channel.stderr, f"Ray lost the worker: {error}\n".encode())
                self._ended = -int(signal.SIGKILL)
        finally:
            channel.close_writing()
            self._left = True
            wake()

    def reap(self) -> bool:
        """Take note of what the actor told; True if the worker ended since the last call."""
        ended = self.returncode is None and self._ended is not None
        if ended:
            self.returncode = self._ended
        self.gone = self._left
        return ended

    def abandon(self) -> None:
        """End the actor, too."""
        super().abandon()
        self.end()

    def end(self) -> None:
        """End the actor, and with it the worker's group."""
        self._ray.kill(self._actor, no_restart=True)

    def _send(self, number: int, *, group: bool) -> None:
        self._actor.send.remote(number, group)


def _write(descriptor: int | None, data: bytes) -> None:
    assert descriptor is not None, "both streams are captured"
    while data:
        data = data[os.write(descriptor, data) :]
