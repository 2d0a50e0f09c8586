"""Whether records of one process and of many are the same training, what differs first, and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

__all__ = ["Difference", "Row", "Verdict", "compare"]

# Relative to the norms of what is compared: another order of sums makes about 1e-6 in float32.
_LOSS, _GRADIENT, _UPDATE = 1e-4, 1e-3, 5e-2
# A parameter whose gradient is so small beside all gradients has one of rounding alone (a bias in front of
# batch norm, of keys in attention), which Adam makes a step of.
_NOISE = 1e-5
_WEIGHT = 1e-6  # of a parameter itself, below which the difference of updates is rounding
_COARSER = {"no": 1, "fp16": 20, "bf16": 50, "fp8": 500}  # steps of rounding, against those of float32

_Record = dict[str, Any]
_Sketches = dict[str, list[float]]


@dataclass(frozen=True)
class Difference:
    """The first difference.

    Args:
        kind: "initial weights", "samples", "learning rate", "loss", "gradients" or "parameters".
        step: The optimizer step, from 1; 0 before the first.
        text: What differs, in a sentence.
    """

    kind: str
    step: int
    text: str


@dataclass(frozen=True)
class Row:
    """One step in both runs.

    Args:
        step: Its number, from 1.
        samples: Of one process and of many.
        losses: Likewise.
        norms: Norms of all gradients, before clipping; of many processes that farthest from the first.
        apart: The largest distance of parameters after the step, relative to what training changed in them.
    """

    step: int
    samples: tuple[int, int]
    losses: tuple[float, float]
    norms: tuple[float, float]
    apart: float


@dataclass(frozen=True)
class Verdict:
    """What the comparison found.

    Args:
        rows: The steps that both runs made.
        difference: The first difference; None if there is none.
        causes: What probably makes it, in sentences; empty where that is not known.
        notes: What else is to be known about the comparison.
    """

    rows: tuple[Row, ...]
    difference: Difference | None
    causes: tuple[str, ...]
    notes: tuple[str, ...]


def compare(one: _Record, many: Sequence[_Record]) -> Verdict:
    """Compare the record of one process with those of many processes.

    Args:
        one: What the recorder wrote (see `accel.observe.record`), of one process.
        many: The same of each process of the other run, in the order of their ranks.
    """
    length = min(len(record["steps"]) for record in (one, *many))
    comparison = _Comparison(one, many, _COARSER.get(one["precision"], 1))
    rows = tuple(comparison.row(place) for place in range(length))
    difference = next(comparison.differences(length), None)
    causes = tuple(comparison.causes(difference)) if difference is not None else ()
    return Verdict(rows, difference, causes, tuple(comparison.notes(length)))


@dataclass(frozen=True)
class _Comparison:
    one: _Record
    many: Sequence[_Record]
    coarser: int

    @property
    def shards(self) -> list[_Record]:
        """One record of each share of the data, in their order."""
        by_rank = {record["data_rank"]: record for record in reversed(self.many)}
        return [by_rank[rank] for rank in sorted(by_rank)]

    # What the runs did

    def row(self, place: int) -> Row:
        one = self.one["steps"][place]
        norm = _norm(one)
        norms = [_norm(record["steps"][place]) for record in self.many]
        apart = [
            _distance(step["parameters"], one["parameters"], name) / changed
            for step in (record["steps"][place] for record in self.many)
            for name, changed in self._changes(place).items()
            if changed and name in step["parameters"]
        ]
        return Row(
            step=place + 1,
            samples=(len(one["samples"]), sum(len(item) for item in self._samples(place))),
            losses=(_mean_loss([one]), self._loss(place)),
            norms=(norm, max(norms, key=lambda item: abs(item - norm))),
            apart=max(apart, default=0.0),
        )

    def _changes(self, place: int) -> dict[str, float]:
        """By how much training has changed each parameter that it changes for good."""
        first, now = self.one["initial"], self.one["steps"][place]["parameters"]
        noise = self._noise(place)
        return {name: _distance(now, first, name) for name in first if name in now and name not in noise}

    def _noise(self, place: int) -> set[str]:
        """Parameters whose gradients were of rounding alone so far."""
        steps = self.one["steps"][: place + 1]
        largest: dict[str, float] = {}
        for step in steps:
            total = _total(step["gradients"])
            for name, item in step["gradients"].items():
                largest[name] = max(largest.get(name, 0.0), item[0] / total if total else 0.0)
        return {name for name, share in largest.items() if share < _NOISE * self.coarser}

    def _samples(self, place: int) -> list[list[int]]:
        return [record["steps"][place]["samples"] for record in self.shards]

    def _loss(self, place: int) -> float:
        return _mean_loss([record["steps"][place] for record in self.shards])

    # What differs

    def differences(self, length: int) -> Iterator[Difference]:
        """All differences, in the order in which they came about."""
        yield from self._different_starts()
        for place in range(length):
            yield from self._different_samples(place)
            yield from self._different_rates(place)
            yield from self._different_losses(place)
            yield from self._different_gradients(place)
            yield from self._different_parameters(place)
        lengths = [len(record["steps"]) for record in (self.one, *self.many)]
        if len(set(lengths)) > 1:
            text = (
                f"One process made {lengths[0]} steps, and {_processes(range(len(self.many)))} made "
                f"{', '.join(map(str, lengths[1:]))}."
            )
            yield Difference("samples", length + 1, text)

    def _different_starts(self) -> Iterator[Difference]:
        first = self.one["initial"]
        for record in self.many:
            unlike = first.keys() ^ record["initial"].keys()
            if unlike:
                text = f"The models have other parameters, {min(unlike)} among them."
                yield Difference("initial weights", 0, text)
            for name, sketch in first.items():
                if name in record["initial"]:
                    apart = _distance(record["initial"], first, name)
                    if apart and not apart <= _WEIGHT * sketch[0]:
                        text = (
                            f"{name} starts from other values on process {record['process']}: "
                            f"{_relative(apart, sketch[0])} away from those of one process."
                        )
                        yield Difference("initial weights", 0, text)

    def _different_samples(self, place: int) -> Iterator[Difference]:
        wanted = self.one["steps"][place]["samples"]
        found = self._samples(place)
        surplus = Counter(item for samples in found for item in samples) - Counter(wanted)
        missing = Counter(wanted) - Counter(item for samples in found for item in samples)
        if not surplus and not missing:
            return
        counts = f"one process took {len(wanted)} samples, and {len(found)} processes took "
        counts += " and ".join(str(len(samples)) for samples in found)
        for rank, samples in enumerate(found):
            for number, item in enumerate(samples, start=1):
                if item in surplus:
                    process, when = self.shards[rank]["process"], self._place_of(item, place)
                    text = f"Sample {number} of process {process} {when} ({counts})."
                    yield Difference("samples", place + 1, text)
                    return
        number = next(number for number, item in enumerate(wanted, start=1) if item in missing)
        yield Difference(
            "samples", place + 1, f"Sample {number} of one process came to none of many ({counts})."
        )

    def _place_of(self, item: int, place: int) -> str:
        if item in self.one["steps"][place]["samples"]:
            return "came more often than on one process"
        steps = [number for number, step in enumerate(self.one["steps"], start=1) if item in step["samples"]]
        return f"came in step {steps[0]} on one process" if steps else "did not come on one process"

    def _different_rates(self, place: int) -> Iterator[Difference]:
        wanted = self.one["steps"][place]["rates"]
        for record in self.many:
            for group, pair in enumerate(zip(wanted, record["steps"][place]["rates"], strict=False)):
                if not math.isclose(*pair, rel_tol=1e-6):
                    text = (
                        f"The learning rate of group {group} is {pair[1]:.6g} on process "
                        f"{record['process']}, and {pair[0]:.6g} on one process."
                    )
                    yield Difference("learning rate", place + 1, text)

    def _different_losses(self, place: int) -> Iterator[Difference]:
        one, many = _mean_loss([self.one["steps"][place]]), self._loss(place)
        # What rounding made of the parameters grows with the steps.
        allowed = _LOSS * self.coarser * (place + 1)
        if not _alike(one, many, allowed):
            of_each = [_mean_loss([record["steps"][place]]) for record in self.shards]
            shown = " and ".join(f"{loss:.6g}" for loss in of_each)
            text = f"The loss is {many:.6g} over all processes ({shown}), and {one:.6g} on one process."
            yield Difference("loss", place + 1, text)

    def _different_gradients(self, place: int) -> Iterator[Difference]:
        wanted = self.one["steps"][place]["gradients"]
        total = _total(wanted)
        allowed = _GRADIENT * self.coarser * (place + 1)
        for name, sketch in wanted.items():
            for record in self.many:
                found = record["steps"][place]["gradients"]
                apart = _distance(found, wanted, name)
                # Not a number on both sides is the same, and no limit is above it.
                if apart and not apart <= allowed * (sketch[0] + 0.1 * total):
                    text = (
                        f"The gradient of {name} on process {record['process']} is "
                        f"{_relative(apart, sketch[0])} away from that of one process."
                    )
                    yield Difference("gradients", place + 1, text)
        # Clipping hides a factor of all gradients.
        norm = self.one["steps"][place]["norm"]
        for record in self.many if norm is not None else ():
            clipped = record["steps"][place]["norm"]
            if clipped is None or not _alike(norm, clipped, allowed):
                text = (
                    f"The norm of the gradients before clipping is {clipped} on process {record['process']}, "
                    f"and {norm} on one process."
                )
                yield Difference("gradients", place + 1, text)

    def _different_parameters(self, place: int) -> Iterator[Difference]:
        changes = self._changes(place)
        wanted = self.one["steps"][place]["parameters"]
        for name, changed in changes.items():
            for record in self.many:
                apart = _distance(record["steps"][place]["parameters"], wanted, name)
                allowed = _UPDATE * self.coarser * changed + _WEIGHT * wanted[name][0]
                if apart and not apart <= allowed:
                    process, times = record["process"], apart / changed if changed else math.inf
                    text = (
                        f"{name} on process {process} is away from that of one process by {times:.2g} times "
                        "what training has changed in it."
                    )
                    yield Difference("parameters", place + 1, text)

    # Why

    def causes(self, difference: Difference) -> Iterator[str]:
        """What is known to make such a difference, and is there."""
        unprepared = {
            kind: sorted({name for record in self.many for name in record["unprepared"][kind]})
            for kind in ("model", "optimizer", "loader")
        }
        if difference.kind == "samples":
            yield from self._causes_of_samples(difference, unprepared["loader"])
        if difference.kind == "initial weights":
            yield (
                "The weights are drawn without a seed, or after other draws. Call set_seed(n) before the "
                "model is made."
            )
        if difference.kind in ("loss", "gradients", "parameters") and unprepared["model"]:
            yield (
                f"{' and '.join(unprepared['model'])} is not prepared: nobody averages its gradients, so "
                "that each process trains weights of its own. Pass it to accelerator.prepare(), and use what "
                "comes back."
            )
        elif difference.kind in ("loss", "gradients", "parameters") and unprepared["optimizer"]:
            yield (
                f"{' and '.join(unprepared['optimizer'])} is not prepared: it steps in the middle of an "
                "accumulation window too, where each process has gradients of its own. Pass it to "
                "accelerator.prepare(), and use what comes back."
            )
        elif difference.kind in ("loss", "gradients"):
            yield from self._causes_of_losses(difference)

    def _causes_of_samples(self, difference: Difference, unprepared: list[str]) -> Iterator[str]:
        if unprepared:
            yield (
                f"The {' and '.join(unprepared)} is not prepared, so that its samples are not shared out "
                "over the processes. Pass it to accelerator.prepare(), and iterate over what comes back."
            )
            return
        steps = self.one["steps"]
        place = difference.step - 1
        if place < len(steps) and len(steps[place]["samples"]) < max(len(step["samples"]) for step in steps):
            yield (
                "The step is the last of an epoch and is not full: it is completed with samples from the "
                "start, so that all processes have equally many (even_batches)."
            )
            return
        yield (
            "The order is drawn without a seed, or by a generator that is not the same in each run. Call "
            "set_seed(n) before the loader is prepared."
        )

    def _causes_of_losses(self, difference: Difference) -> Iterator[str]:
        place = difference.step - 1
        found = 0
        if self.one["batch_norm"]:
            found += 1
            yield (
                f"{self.one['batch_norm'][0]} is batch norm in training: it normalizes by the mean and "
                "variance of the batch of one process, which is a part of the whole. Use "
                "torch.nn.SyncBatchNorm (on GPUs), group or layer norm."
            )
        if self.one["dropout"]:
            found += 1
            yield (
                f"{self.one['dropout'][0]} is dropout, and draws other numbers on each process. That is as "
                "it should be; `accel verify --without_dropout` verifies everything else."
            )
        elif self.one["draws"]:
            found += 1
            yield (
                "A step draws random numbers (noise, masks, dropout by a function), which are others on "
                "each process. --without_dropout switches dropout off, and nothing else."
            )
        one, many = _mean_loss([self.one["steps"][place]]), self._loss(place)
        of_each = [_mean_loss([record["steps"][place]]) for record in self.shards]
        if not found and difference.kind == "loss" and many and _alike(one / many, len(of_each), 1e-3):
            yield (
                "The loss is a sum over the batch, and gradients are averaged over the processes. Pass a "
                "mean, or accelerator.backward(loss, weight=n) with the number of items that the sum is over."
            )
        elif not found and difference.kind == "loss" and min(of_each) <= one <= max(of_each):
            yield (
                "The loss is a mean over items of which processes have unequal numbers (tokens, say), and a "
                "mean of means is not the mean over all. Pass the sum, and how many items it is over: "
                "accelerator.backward(loss_sum, weight=num_items)."
            )

    def notes(self, length: int) -> Iterator[str]:
        """What the comparison leaves out, and what is wrong without a difference."""
        left = sorted({name for record in (self.one, *self.many) for name in record["not_compared"]})
        if left:
            first = left[0] + (", ..." if len(left) > 1 else "")
            yield f"Not compared, as each process has a part: {first} ({len(left)} in all)."
        for kind in ("model", "optimizer", "loader"):
            names = sorted({name for record in self.many for name in record["unprepared"][kind]})
            if names:
                yield f"Not prepared: {kind} {', '.join(names)}."
        if not any(step["samples"] for step in self.one["steps"]):
            yield "No samples were seen: neither a DataLoader nor the arguments of the model had tensors."
        for place, step in enumerate(self.one["steps"][:length]):
            if step["losses"] and not math.isfinite(_mean_loss([step])):
                yield f"The loss is not finite from step {place + 1} on: what comes after cannot be compared."
                break
        if self.one["precision"] != "no":
            yield (
                f"The script trains in {self.one['precision']}, so that only differences above "
                f"{_GRADIENT * self.coarser:.0%} of a gradient are seen."
            )


def _mean_loss(steps: Sequence[dict[str, Any]]) -> float:
    """The loss over processes: the sum over all weights where there are weights, else the mean of means."""
    losses = [pair for step in steps for pair in step["losses"]]
    if not losses:
        return math.nan
    if any(weight is not None for _, weight in losses):
        weights = sum(weight or 0.0 for _, weight in losses)
        return sum(value for value, _ in losses) / weights if weights else 0.0
    return fmean(sum(value for value, _ in step["losses"]) for step in steps)


def _alike(one: float, other: float, tolerance: float) -> bool:
    both_nan = math.isnan(one) and math.isnan(other)
    return both_nan or math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-9)


def _total(sketches: _Sketches) -> float:
    return math.sqrt(sum(sketch[0] ** 2 for sketch in sketches.values()))


def _norm(step: dict[str, Any]) -> float:
    norm: float | None = step["norm"]
    return _total(step["gradients"]) if norm is None else norm


def _distance(one: _Sketches, other: _Sketches, name: str) -> float:
    """The estimated norm of the difference of two tensors; one that is not there counts as zeros."""
    first, second = one.get(name), other.get(name)
    if first is None or second is None:
        present = first or second
        return present[0] if present else 0.0
    if first == second:
        return 0.0
    apart = math.sqrt(fmean((a - b) ** 2 for a, b in zip(first[1:], second[1:], strict=True)))
    both_nan = math.isnan(first[0]) and math.isnan(second[0])
    return 0.0 if both_nan else apart


def _relative(apart: float, norm: float) -> str:
    return f"{apart / norm:.2g} times its norm" if norm else f"{apart:.2g}"


def _processes(ranks: Sequence[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
