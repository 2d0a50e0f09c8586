"""The observer that measures where the time of a run goes."""

from __future__ import annotations

import json
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel.observe.observer import Observer
from accel.observe.statistics import attach
from accel.observe.statistics.clock import PARTS, Clock
from accel.observe.statistics.stragglers import OWN_PARTS, Straggler, find_stragglers
from accel.observe.statistics.summary import exchange, next_number, peak_memory, render, summarize
from accel_data.dispatch.loader import DataLoaderDispatcher
from accel_ops.trees.tensors import ignorant_find_batch_size
from accel_state.devices.table import device_spec
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel.observe.statistics import StatisticsKwargs
    from accel.training.run import Run

_GATHER_S = 1.0  # the longest wait for a gather that not all processes have joined


class Statistics(Observer):
    """Measures the time of each part of a run on this process, and brings it together.

    Args:
        run: The run.
        settings: The settings.
        folder: Where files go; None for none.
    """

    def __init__(self, run: Run, settings: StatisticsKwargs, folder: Path | None) -> None:
        self.settings = settings
        self.folder = folder
        self.process = run.process
        self.loaders = run.engine.loaders
        self.number = next_number(run.process)
        device = run.process.device
        synchronize = partial(device_spec(device).synchronize, device) if settings.synchronize else None
        self.clock = Clock(synchronize)
        self.started = time.time()
        self.steps = self.samples = 0
        self.slow: dict[tuple[int, str], dict[str, Any]] = {}
        self._slow_before: set[int] = set()  # at the last gather
        self._gathers = 0
        self._steps_of: list[int] = []  # per optimizer
        self._unused: dict[int, deque[int]] = {}  # per loader: sizes of the batches that are not used yet
        self._before = (0, 0, self.clock.read())  # steps, samples and seconds at the last gather
        self._pending: list[tuple[Any, torch.Tensor, int]] = []  # the work, its result, the step
        self._awaits_gradients = False
        # A group of their own: gathers are never confused with other collectives, and no step awaits them.
        distributed = run.process.world_size > 1 and dist.is_initialized() and dist.is_gloo_available()
        self._group = dist.new_group(backend="gloo") if distributed and settings.every else None
        awaited = partial(_awaited, run.models) if run.process.world_size > 1 else None
        self._undo = [
            attach.time_collectives(self.clock),
            attach.time_backward(self.clock, run.engine, awaited, self._use_samples),
        ]

    def model_prepared(self, model: torch.nn.Module) -> None:
        """Time its forward passes."""
        self._awaits_gradients = self._awaits_gradients or bool(_awaited([model]))
        self._undo.append(attach.time_model(self.clock, model))

    def optimizer_prepared(self, optimizer: Any) -> None:
        """Time its steps, and count them."""
        self._steps_of.append(0)
        stepped = partial(self._stepped, len(self._steps_of) - 1)
        self._undo.append(attach.time_step(self.clock, optimizer, stepped))

    def loader_prepared(self, loader: Any) -> None:
        """Time its reading, and count samples."""
        # The others wait for process 0, which reads for all.
        receives = isinstance(loader, DataLoaderDispatcher) and self.loaders.dp_rank_and_size[0] != 0
        part = "collectives" if receives else "data"
        self._undo.append(attach.time_loader(self.clock, loader, part, self._begin_pass))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time `save_state`, its waits for others included."""
        with self.clock.timed("checkpoint"):
            yield

    loading = saving

    def stop(self) -> None:
        """Take everything off; the main process prints and writes the summary."""
        if not self._undo:
            return
        seconds = self.clock.read()
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        if self._group is not None and dist.is_initialized():
            self._await_gathers()
            dist.destroy_process_group(self._group)
        ranks = exchange(self.process, self.number, self._own(seconds))
        if ranks is None:
            return
        share = self.loaders.dp_rank_and_size[1] / self.process.world_size
        summary = summarize(ranks, self.process.world_size, share, self.started, self.settings.every)
        if self._gathers < 2 and not summary["missing"]:
            steps = [own["steps"] for own in ranks]
            found = self._find_slow([own["seconds"] for own in ranks], steps)
            self._note_slow(found, 1, summary["steps"])
        summary["slow"] = list(self.slow.values())
        self._write("summary.json", json.dumps(summary, indent=1) + "\n", mode="w")
        if self.settings.summary:
            print(render(summary), flush=True)

    def _own(self, seconds: Mapping[str, float]) -> dict[str, Any]:
        return {
            "rank": self.process.rank,
            "host": platform.node(),
            "device": str(self.process.device),
            "steps": self.steps,
            "samples": self.samples,
            "seconds": {part: round(value, 6) for part, value in seconds.items()},
            "peak_memory": peak_memory(self.process),
        }

    def _begin_pass(self, loader: Any) -> tuple[Callable[[Any], None], Callable[[], None]]:
        if getattr(loader, "num_workers", 0):  # forked while no thread of gloo is at work
            self._await_gathers()
        before, key, sizes = self.samples, id(loader), deque[int]()
        self._unused[key] = sizes

        def got(batch: Any) -> None:
            real = getattr(loader, "real_samples", None)
            if real is not None:
                sizes.append(real[self.loaders.dp_rank_and_size[0]])
                return
            # Nothing is padded. The usual batch is looked at here, for a fifth of the time.
            first = batch
            while isinstance(first, (list, tuple, dict)) and first:
                first = next(iter(first.values() if isinstance(first, dict) else first))
            is_usual = isinstance(first, torch.Tensor) and first.dim()
            sizes.append(first.shape[0] if is_usual else ignorant_find_batch_size(batch) or 0)

        def ended() -> None:
            # Batches that were only evaluated; those that a loop has read ahead have their passes to come.
            if self.samples == before and self._unused.get(key) is sizes:
                del self._unused[key]

        return got, ended

    def _use_samples(self) -> None:
        # One batch of each loader: some loops read those of a window before its first backward pass.
        for sizes in self._unused.values():
            if sizes:
                self.samples += sizes.popleft()

    def _stepped(self, index: int) -> None:
        steps = self._steps_of[index] = self._steps_of[index] + 1
        if self._pending:
            self._take_gathers()
        # Of several optimizers the one with most steps counts.
        if steps > self.steps:
            self.steps = steps
            if self.settings.every and self.steps % self.settings.every == 0:
                self._gather()

    def _gather(self) -> None:
        """Begin to bring together the numbers since the last gather, in one collective."""
        steps, samples, seconds = self._before
        now = self.clock.read()
        self._before = (self.steps, self.samples, now)
        values = [now[part] - seconds[part] for part in PARTS]
        own = torch.tensor([self.steps - steps, self.samples - samples, *values], dtype=torch.float64)
        # Without gloo the numbers come together at the end alone.
        if self._group is None:
            if self.process.world_size == 1:
                self._take(own[None], self.steps)
            return
        gathered = own.new_empty(self.process.world_size, len(own))
        parts = list(gathered.unbind())
        work = dist.distributed_c10d.all_gather(parts, own, group=self._group, async_op=True)
        self._pending.append((work, gathered, self.steps))

    def _take_gathers(self) -> None:
        while self._pending and self._pending[0][0].is_completed():
            work, gathered, last = self._pending.pop(0)
            try:
                work.wait()
            except RuntimeError:  # a process has ended, after fewer steps
                self._pending.clear()
                return
            self._take(gathered, last)

    def _await_gathers(self) -> None:
        """Wait for the gathers under way."""
        until = time.monotonic() + _GATHER_S
        while self._pending and time.monotonic() < until:
            self._take_gathers()
            time.sleep(0 if not self._pending else 0.0005)

    def _take(self, gathered: torch.Tensor, last: int) -> None:
        """Take the numbers of all processes; the main process notes and writes what they say."""
        if not self.process.is_main:
            return
        rows = gathered.tolist()
        steps = [int(values[0]) for values in rows]
        seconds = [dict(zip(PARTS, values[2:], strict=True)) for values in rows]
        found = self._find_slow(seconds, steps)
        self._gathers += 1
        # Twice in a row: any process may be held up for once.
        lasting = [slow for slow in found if slow.rank in self._slow_before]
        first = last - steps[0] + 1
        for slow in lasting:
            if (slow.rank, slow.part) not in self.slow:  # said once; the summary has the rest
                warn(slow.describe(first, last), about="process")
        self._note_slow(lasting, first, last)
        self._slow_before = {slow.rank for slow in found}
        share = self.loaders.dp_rank_and_size[1] / self.process.world_size
        whole = max(sum(times.values()) for times in seconds)
        if self.folder is None or not whole:  # nothing that is timed has run
            return
        own = sorted(1e3 * sum(times[part] for part in OWN_PARTS) / steps[0] for times in seconds)
        numbers = {
            "samples_per_second": share * sum(values[1] for values in rows) / whole,
            "step_ms": 1e3 * whole / steps[0],
            "own_ms/fastest": own[0],
            "own_ms/median": own[len(own) // 2],
            "own_ms/slowest": own[-1],
        }
        values = {f"statistics/{name}": round(value, 4) for name, value in numbers.items()}
        line: dict[str, Any] = {"time": round(time.time(), 3), "step": last, "values": values}
        line["slow"] = [
            {"rank": slow.rank, "part": slow.part, "ratio": round(slow.ratio, 3)} for slow in found
        ]
        self._write("statistics.jsonl", json.dumps(line) + "\n", mode="a")

    def _write(self, name: str, text: str, mode: str) -> None:
        """Write to a file of the folder; one that cannot be written does not stop training."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / name).open(mode) as file:
                file.write(text)
        except OSError as error:
            warn(
                f"Statistics cannot write {self.folder / name}: {type(error).__name__}: {error}. Training "
                "goes on; no file of statistics is written from here on.",
                about="process",
            )
            self.folder = None

    def _find_slow(self, seconds: list[dict[str, float]], steps: list[int]) -> list[Straggler]:
        return find_stragglers(seconds, steps, self.settings.slow, hides_waits=not self._awaits_gradients)

    def _note_slow(self, found: list[Straggler], first: int, last: int) -> None:
        for slow in found:
            key = slow.rank, slow.part
            known = self.slow.setdefault(key, {"rank": slow.rank, "part": slow.part, "ratio": 0.0})
            known["ratio"] = max(known["ratio"], round(slow.ratio, 3))
            known["steps"] = [known.get("steps", [first])[0], last]


def _awaited(models: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the models whose gradients are awaited at the end of backward."""
    inner = (getattr(model, "_orig_mod", model) for model in models)  # of compiled models
    return [model for model in inner if isinstance(model, DistributedDataParallel)]
