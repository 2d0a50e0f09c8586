"""Start the workers on a Ray cluster: Ray places them, this process looks after them.

An actor per worker runs it as a process (see `accel_launch.launchers.ray.actor`). Its output and its end come
back through Ray, and are supervised as those of workers on this machine are.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accel_launch.errors import LaunchError, NotAvailableError
from accel_launch.launchers.ray.actor import ActorPlace, RayWorker
from accel_launch.launchers.ray.remote import RayRemote
from accel_launch.launchers.torchrun import rendezvous_timeout
from accel_launch.local.output.destinations import Output
from accel_launch.local.signals import SignalPipe, ended_by_sigterm
from accel_launch.local.supervisor import Member, Supervisor
from accel_launch.plan.environment import worker_environment
from accel_launch.plan.plan import LauncherCommand
from accel_state import env
from accel_state.env import VARIABLES, CPUInformation
from accel_state.imports.packages import install_hint

if TYPE_CHECKING:
    from accel_launch.plan.plan import LaunchPlan

_NOTE_AFTER_S = 5.0
_JOIN_S = 5.0
_THREADS = 8  # of an actor: one runs the worker, the others send it signals
_UNREAD = 16  # chunks of output; a worker that writes faster than they are read waits


def prepare(plan: LaunchPlan, base: Mapping[str, str]) -> LauncherCommand:
    """Return what rank 0 runs, as far as it is known before Ray has placed it.

    Args:
        plan: What to start.
        base: This process's environment.
    """
    environ = dict(plan.environ)
    count = "one process per GPU of the cluster"
    if plan.settings.is_set("num_processes"):
        total = plan.settings.value("num_processes")
        environ |= {"RANK": "0", "WORLD_SIZE": str(total), "ACCELERATE_NUM_PROCESSES": str(total)}
        count = f"{total} processes"
    return LauncherCommand(
        plan.command,
        environ,
        f"{count}, placed by Ray, which decides the address and the local ranks; rank 0:",
    )


def run(plan: LaunchPlan) -> int:
    """Run the workers to their end.

    Args:
        plan: What to start.

    Returns:
        As `accel_launch.local.run.run_local`.

    Raises:
        NotAvailableError: If Ray is not installed.
        LaunchError: If there is no cluster, or it has no room for the workers in time.
    """
    ray = _import_ray()
    # Again when connected: Ray replaces the handler.
    with ended_by_sigterm(), _connected(ray), ended_by_sigterm():
        bundle, total = _resources(ray, plan)
        with _placement_group(ray, plan, bundle, total) as group:
            actors = _place_actors(ray, group, bundle, total)
            address, port = actors[0].place.address, _reserve(ray, plan, actors[0])
            with SignalPipe() as signals:
                state = Supervisor(plan, Output.of(plan, captured=True))
                try:
                    for placed in actors:
                        state.members.append(_start(ray, state, placed, address, port, signals.wake))
                    state.loop(signals, lambda pid: None)
                    code = state.conclude()
                finally:
                    _end(state)
            state.output.finish()
    return code


def _end(state: Supervisor) -> None:
    """End what is left of the workers, and the threads that follow them, which use this process's pipes."""
    for member in state.members:
        member.worker.end()
        for stream in member.streams:
            stream.close()  # a thread may wait for room in its pipe
    until = time.monotonic() + _JOIN_S
    for member in state.members:
        assert isinstance(member.worker, RayRemote)
        member.worker.join(max(until - time.monotonic(), 0))


def _import_ray() -> Any:
    try:
        return import_module("ray")
    except ImportError as error:
        raise NotAvailableError(
            f"--launcher ray needs Ray: {error}. Install it with: {install_hint('ray', 'accel-launch')}."
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
class _PlacedActor:
    """A worker's actor, and its place among the others.

    Args:
        actor: The handle.
        place: Where it is.
        gpus: The GPUs of all workers of its machine, in the order of their local ranks.
        information: Its rank and the number of workers, in all and on its machine.
        machine: The machine's rank and the number of machines.
    """

    actor: Any
    place: ActorPlace
    gpus: tuple[str, ...]
    information: CPUInformation
    machine: tuple[int, int]


def _place_actors(ray: Any, group: Any, bundle: dict[str, float], total: int) -> list[_PlacedActor]:
    """Let Ray place the actors; those of one machine get ranks that follow each other."""
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
        places: list[ActorPlace] = ray.get([actor.place.remote() for actor in actors])
    except ray.exceptions.RayError as error:
        raise LaunchError(
            f"Ray could not start the workers: {error}\nEach machine needs accel-launch in this version."
        ) from None
    # Rank 0 stays the first actor: the order is that in which machines appear.
    nodes = list(dict.fromkeys(place.node for place in places))
    ranked: list[_PlacedActor] = []
    for index, node in enumerate(nodes):
        here = [(actor, place) for actor, place in zip(actors, places, strict=True) if place.node == node]
        gpus = tuple(gpu for _, place in here for gpu in place.gpus)
        for local, (actor, place) in enumerate(here):
            information = CPUInformation(len(ranked), total, local, len(here))
            # Ranks in this order: local ranks of a machine follow each other.
            ranked.append(_PlacedActor(actor, place, gpus, information, (index, len(nodes))))
    return ranked


def _resources(ray: Any, plan: LaunchPlan) -> tuple[dict[str, float], int]:
    """Return what each worker takes, and the number of workers."""
    value, cluster = plan.settings.value, ray.cluster_resources()
    gpus = 0 if value("cpu") else int(cluster.get("GPU", 0))
    bundle: dict[str, float] = {"CPU": value("num_cpu_threads_per_process") or 1}
    if gpus:
        bundle["GPU"] = 1
    total = value("num_processes") if plan.settings.is_set("num_processes") else max(gpus, 1)
    return bundle, total


@contextlib.contextmanager
def _placement_group(ray: Any, plan: LaunchPlan, bundle: dict[str, float], total: int) -> Iterator[Any]:
    """Let Ray set the workers' resources apart, all at once; a program of Ray's gets them back."""
    groups = import_module("ray.util.placement_group")
    # PACK: on as few machines as possible, and on several where one has no room.
    group = groups.placement_group([bundle] * total, strategy="PACK")
    try:
        _wait_for_room(ray, plan, group, bundle, total)
        yield group
    finally:
        groups.remove_placement_group(group)


def _wait_for_room(ray: Any, plan: LaunchPlan, group: Any, bundle: dict[str, float], total: int) -> None:
    """Wait until Ray has set the resources apart; say what is waited for."""
    timeout_s = rendezvous_timeout(plan)
    ready = group.ready()
    if ray.wait([ready], timeout=min(_NOTE_AFTER_S, timeout_s))[0]:
        return
    each = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    has = ", ".join(f"{ray.cluster_resources().get(name, 0):g} {name}" for name in bundle)
    wanted = f"{total} workers of {each}; the cluster has {has} in all"
    if timeout_s > _NOTE_AFTER_S:
        print(f"accel launch: waiting up to {timeout_s:g} s for {wanted}", file=sys.stderr, flush=True)
        if ray.wait([ready], timeout=timeout_s - _NOTE_AFTER_S)[0]:
            return
    raise LaunchError(
        f"Ray had no room within {timeout_s:g} s for {wanted}. Give fewer --num_processes, or wait "
        "longer with --rdzv_conf timeout=SECONDS."
    )


def _reserve(ray: Any, plan: LaunchPlan, first: _PlacedActor) -> int:
    """Reserve the port of rank 0 on its machine."""
    port = plan.settings["main_process_port"]
    try:
        return int(ray.get(first.actor.reserve.remote(port.value, port.detail if port.is_set else "")))
    except ray.exceptions.RayTaskError as error:
        raise LaunchError(str(error.cause)) from None


def _start(
    ray: Any, state: Supervisor, placed: _PlacedActor, address: str, port: int, wake: Callable[[], None]
) -> Member:
    rank = placed.information.rank
    environ = state.output.environment(
        worker_environment(state.plan.environ, placed.information, address, port, placed.machine)
    )
    if placed.gpus:
        # All GPUs of the run on this machine, as on any: a worker takes the one of its local rank.
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(placed.gpus)
    base = env.snapshot()
    # Variables of the table always: the other machine may have its own values for them.
    changes = {name: text for name, text in environ.items() if name in VARIABLES or base.get(name) != text}
    channel = state.output.open(rank)
    events = placed.actor.run.options(
        num_returns="streaming", _generator_backpressure_num_objects=_UNREAD
    ).remote(
        list(state.plan.command),
        changes,
        os.getcwd(),
        sys.executable,
        placed.place.address if placed.machine[1] > 1 else None,
    )
    worker = RayRemote(ray, rank, placed.place.host, placed.actor)
    worker.start(events, channel, wake)
    return Member(worker, channel.streams)
