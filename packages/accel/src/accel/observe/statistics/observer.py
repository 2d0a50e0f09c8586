"""The observer that measures where the time of a run goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from accel.engines.common.gradient_waits import GradientWaits
from accel.observe.rank_reports import RankReports, describe_rank
from accel.observe.report.files import RunFiles
from accel.observe.report.summary import render_text
from accel.observe.statistics.clock import SECTIONS, Clock
from accel.observe.statistics.stragglers import RANK_SECTIONS, Straggler, find_stragglers
from accel.observe.unused_batches import UnusedBatches
from accel_data.dispatch.loader import DataLoaderDispatcher
from accel_ops.trees.tensors import ignorant_find_batch_size
from accel_state.devices.table import device_spec
from accel_state.logging.warning import warn
from accel_state.step_events import Observer, unsubscribe

if TYPE_CHECKING:
    from accel.observe.statistics import StatisticsKwargs
    from accel.training.run import Run

ANSWER_S = 30.0
"""How long the main process waits at the end for the numbers of the other ranks, in seconds."""


class Statistics(Observer):
    """Measures the time of each part of a run on this process; the main process gathers those of all.

    Args:
        run: The run.
        settings: The settings.
        folder: Where files go; None for none.
    """

    def __init__(self, run: Run, settings: StatisticsKwargs, folder: Path | None) -> None:
        self._run, self._settings = run, settings
        self._reports = RankReports(run.process, "statistics")
        self._data_rank, size = run.engine.data_parallel.rank_and_size
        self._files = RunFiles(folder, distinct_fraction=size / run.process.world_size)
        now = partial(_synchronized_now, run.process.device) if settings.synchronize else time.perf_counter
        self.clock = Clock(now)
        self._note, self._now = self.clock.note, self.clock.now
        self._batches = UnusedBatches()
        self._steps = self._samples = 0
        self._steps_of: dict[int, int] = {}  # by the id of the optimizer
        self._reading = "data"  # the part that the last batch was read in
        self._waits = GradientWaits(rate=max(1, settings.every // 10 or 10))
        self._before: dict[str, Any] = {"steps": 0, "samples": 0, "seconds": dict.fromkeys(SECTIONS, 0.0)}
        self._sent: list[int] = []  # steps of the gathers that are not complete yet
        self._slow: dict[tuple[int, str], dict[str, Any]] = {}
        self._slow_before: set[int] = set()  # at the last gather
        self._hooks: list[Any] = []

    def model_prepared(self, model: torch.nn.Module) -> None:
        """Time its forward passes."""
        inner = self._waits.add(model)
        # The rest of the outer one waits for the buffers of process 0.
        for section, module in (("collectives", model), ("forward", inner))[model is inner :]:
            begin, end = (
                partial(self.clock.note_hook, section, True),
                partial(self.clock.note_hook, section, False),
            )
            self._hooks.append(module.register_forward_pre_hook(begin, prepend=True))
            self._hooks.append(module.register_forward_hook(end, always_call=True))  # also when it raises

    def loader_started(self, loader: Any) -> None:
        """Count its samples from here."""
        self._batches.start(loader)

    def before_batch(self, loader: Any) -> None:
        """Time the reading of a batch; other ranks wait for process 0 where that reads for all."""
        receives = self._data_rank and isinstance(loader, DataLoaderDispatcher)
        self._reading = "collectives" if receives else "data"
        self._note((self._reading, True, self._now(), get_ident()))

    def after_batch(self, loader: Any, batch: Any) -> None:
        """Count the samples of a batch, which a backward pass may use."""
        self._note((self._reading, False, self._now(), get_ident()))
        real = loader.real_samples  # None where nothing is padded
        size = ignorant_find_batch_size(batch) if real is None else real[self._data_rank]
        self._batches.add(loader, size or 0)

    def loader_ended(self, loader: Any) -> None:
        """End the reading of a batch that did not come."""
        self._note((self._reading, False, self._now(), get_ident()))
        self._batches.end(loader)

    def before_backward(self, loss: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Time a backward pass, and count its samples."""
        self._samples += sum(self._batches.use())
        self._note(("backward", True, self._now(), get_ident()))

    def after_backward(self, loss: torch.Tensor) -> None:
        """End it, and sample its wait for the gradients of other ranks."""
        self._note(("backward", False, self._now(), get_ident()))
        if self._waits.is_active and self._run.gradient_state.sync_gradients:
            self._waits.count_pass()

    def before_step(self, optimizer: Any) -> None:
        """Time a step."""
        self._note(("optimizer", True, self._now(), get_ident()))

    def after_step(self, optimizer: Any) -> None:
        """Count it; of several optimizers the one with most steps counts."""
        self._note(("optimizer", False, self._now(), get_ident()))
        steps = self._steps_of[id(optimizer)] = self._steps_of.get(id(optimizer), 0) + 1
        if steps > self._steps:
            self._steps += 1
            if self._settings.every and self._steps % self._settings.every == 0:
                self._gather()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time `save_state`, its waits for other ranks included."""
        self._note(("checkpoint", True, self._now(), get_ident()))
        try:
            yield
        finally:
            self._note(("checkpoint", False, self._now(), get_ident()))

    loading = saving

    def stop(self) -> None:
        """Stop measuring; the main process prints and writes the summary."""
        process, numbers = self._run.process, self._numbers()
        unsubscribe(self._run.gradient_state, self)
        for hook in self._hooks:
            hook.remove()
        self._waits.stop()
        self._reports.send("summary", describe_rank(process) | numbers)
        if not process.is_main:
            return
        ranks = [*(self._reports.receive("summary", ANSWER_S, partial=True) or {}).values()]
        self._receive()
        every = self._settings.every
        summary = self._files.make_summary(ranks, process.world_size, every)
        if not summary["missing"] and not (every and self._steps >= 2 * every):  # too few gathers
            self._add_slow(self._find_slow(ranks), 1, summary["steps"])
        summary["slow"] = list(self._slow.values())
        self._files.write_summary(summary)
        if self._settings.summary:
            print(render_text(summary), flush=True)

    def _numbers(self) -> dict[str, Any]:
        """Return this rank's numbers up to now, with waits for gradients in "collectives"."""
        spent = self.clock.read()["backward"] - self._before["seconds"]["backward"]
        waited = min(self._waits.take(), spent)
        self.clock.seconds["backward"] -= waited
        self.clock.seconds["collectives"] += waited
        return {"steps": self._steps, "samples": self._samples, "seconds": self.clock.read()}

    def _gather(self) -> None:
        """Send the numbers since the last gather."""
        now, before = self._numbers(), self._before
        self._before = now
        report = {name: now[name] - before[name] for name in ("steps", "samples")}
        seconds = {section: now["seconds"][section] - before["seconds"][section] for section in SECTIONS}
        self._reports.send(str(self._steps), report | {"seconds": seconds})
        self._sent.append(self._steps)
        self._receive()

    def _receive(self) -> None:
        """Take the gathers that are complete: others are taken at the next one, so that no step waits."""
        while self._run.process.is_main and self._sent:
            reports = self._reports.receive(str(self._sent[0]))
            if reports is None:
                return
            ranks, last = [*reports.values()], self._sent.pop(0)
            found, first = self._find_slow(ranks), last - ranks[0]["steps"] + 1
            # Twice in a row: any process may be held up for once.
            lasting = [slow for slow in found if slow.rank in self._slow_before]
            self._slow_before = {slow.rank for slow in found}
            self._add_slow(lasting, first, last, warns=True)
            stragglers = [slow.to_dict() for slow in found]
            self._files.add_gather(ranks, last, RANK_SECTIONS, stragglers)

    def _find_slow(self, ranks: list[dict[str, Any]]) -> list[Straggler]:
        return find_stragglers(ranks, self._settings.slow, hides_waits=not self._waits.is_active)

    def _add_slow(self, found: list[Straggler], first: int, last: int, warns: bool = False) -> None:
        for slow in found:
            key, facts = (slow.rank, slow.section), slow.to_dict()
            if warns and key not in self._slow:  # once; the summary has the rest
                warn(slow.describe(first, last), about="process")
            before = self._slow.get(key, facts | {"steps": [first]})
            ratio = max(before["ratio"], facts["ratio"])
            self._slow[key] = before | {"ratio": ratio, "steps": [before["steps"][0], last]}


def _synchronized_now(device: torch.device) -> float:
    device_spec(device).synchronize(device)
    return time.perf_counter()
