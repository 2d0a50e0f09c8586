"""Whether records of one process and of many are the same training, and what differs first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from accel.observe.verify.causes import find_causes
from accel.observe.verify.recorded_runs import (
    Record,
    RecordedRuns,
    distance,
    gradient_norm,
    is_close,
    mean_loss,
    total_norm,
)

# Relative to the norms of what is compared: another order of sums makes about 1e-6 in float32.
_LOSS, _GRADIENT, _UPDATE = 1e-4, 1e-3, 5e-2
# A parameter whose gradient is this small, relative to all, has one of rounding alone (a bias in front of
# batch norm, of keys in attention), which Adam makes a step of.
_NOISE = 1e-5
_WEIGHT = 1e-6  # of a parameter itself, below which the difference of updates is rounding
_COARSER = {"no": 1, "fp16": 20, "bf16": 50, "fp8": 500}  # steps of rounding, against those of float32


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
    """The result of the comparison.

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


def compare(one: Record, many: Sequence[Record]) -> Verdict:
    """Compare the record of one process with those of many processes.

    Args:
        one: What the recorder wrote (see `accel.observe.verify.record`), of one process.
        many: The same of each process of the other run, in the order of their ranks.
    """
    length = min(len(record["steps"]) for record in (one, *many))
    comparison = _Comparison(one, many, _COARSER.get(one["precision"], 1))
    rows = tuple(comparison.row(place) for place in range(length))
    difference = next(comparison.differences(length), None)
    causes = () if difference is None else tuple(find_causes(comparison, difference.kind, difference.step))
    return Verdict(rows, difference, causes, tuple(_notes(comparison, length)))


@dataclass(frozen=True)
class _Comparison(RecordedRuns):
    coarser: int

    # What the runs did

    def row(self, place: int) -> Row:
        one = self.one["steps"][place]
        norm = gradient_norm(one)
        norms = [gradient_norm(record["steps"][place]) for record in self.many]
        apart = [
            distance(step["parameters"], one["parameters"], name) / changed
            for step in (record["steps"][place] for record in self.many)
            for name, changed in self._changes(place).items()
            if changed and name in step["parameters"]
        ]
        return Row(
            step=place + 1,
            samples=(len(one["samples"]), sum(len(item) for item in self.samples(place))),
            losses=(mean_loss([one]), self.loss(place)),
            norms=(norm, max(norms, key=lambda item: abs(item - norm))),
            apart=max(apart, default=0.0),
        )

    def _changes(self, place: int) -> dict[str, float]:
        """By how much training has changed each parameter that it changes for good."""
        first, now = self.one["initial"], self.one["steps"][place]["parameters"]
        noise = self._noise(place)
        return {name: distance(now, first, name) for name in first if name in now and name not in noise}

    def _noise(self, place: int) -> set[str]:
        """Parameters whose gradients were of rounding alone so far."""
        steps = self.one["steps"][: place + 1]
        largest: dict[str, float] = {}
        for step in steps:
            total = total_norm(step["gradients"])
            for name, item in step["gradients"].items():
                largest[name] = max(largest.get(name, 0.0), item[0] / total if total else 0.0)
        return {name for name, ratio in largest.items() if ratio < _NOISE * self.coarser}

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
                    apart = distance(record["initial"], first, name)
                    if apart and not apart <= _WEIGHT * sketch[0]:
                        text = (
                            f"{name} starts from other values on process {record['process']}: "
                            f"{_relative(apart, sketch[0])} away from those of one process."
                        )
                        yield Difference("initial weights", 0, text)

    def _different_samples(self, place: int) -> Iterator[Difference]:
        wanted = self.one["steps"][place]["samples"]
        found = self.samples(place)
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
        one, many = mean_loss([self.one["steps"][place]]), self.loss(place)
        # What rounding made of the parameters grows with the steps.
        allowed = _LOSS * self.coarser * (place + 1)
        if not is_close(one, many, allowed):
            of_each = [mean_loss([record["steps"][place]]) for record in self.shards]
            shown = " and ".join(f"{loss:.6g}" for loss in of_each)
            text = f"The loss is {many:.6g} over all processes ({shown}), and {one:.6g} on one process."
            yield Difference("loss", place + 1, text)

    def _different_gradients(self, place: int) -> Iterator[Difference]:
        wanted = self.one["steps"][place]["gradients"]
        total = total_norm(wanted)
        allowed = _GRADIENT * self.coarser * (place + 1)
        for name, sketch in wanted.items():
            for record in self.many:
                found = record["steps"][place]["gradients"]
                apart = distance(found, wanted, name)
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
            if clipped is None or not is_close(norm, clipped, allowed):
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
                apart = distance(record["steps"][place]["parameters"], wanted, name)
                allowed = _UPDATE * self.coarser * changed + _WEIGHT * wanted[name][0]
                if apart and not apart <= allowed:
                    process, times = record["process"], apart / changed if changed else math.inf
                    text = (
                        f"{name} on process {process} is away from that of one process by {times:.2g} times "
                        "what training has changed in it."
                    )
                    yield Difference("parameters", place + 1, text)


def _notes(comparison: _Comparison, length: int) -> Iterator[str]:
    """Values that were not compared, and mistakes that make no difference."""
    if any(record["loads"] for record in (comparison.one, *comparison.many)):
        yield "load_state found nothing: both runs start without a checkpoint."
    left = sorted({name for record in (comparison.one, *comparison.many) for name in record["not_compared"]})
    if left:
        first = left[0] + (", ..." if len(left) > 1 else "")
        yield f"Not compared, as each process has a part: {first} ({len(left)} in all)."
    for kind in ("model", "optimizer", "loader"):
        names = sorted({name for record in comparison.many for name in record["unprepared"][kind]})
        if names:
            yield f"Not prepared: {kind} {', '.join(names)}."
    if not any(step["samples"] for step in comparison.one["steps"]):
        yield "No samples were seen: neither a DataLoader nor the arguments of the model had tensors."
    for place, step in enumerate(comparison.one["steps"][:length]):
        if step["losses"] and not math.isfinite(mean_loss([step])):
            yield f"The loss is not finite from step {place + 1} on: what comes after cannot be compared."
            break
    if comparison.one["precision"] != "no":
        yield (
            f"The script trains in {comparison.one['precision']}, so that only differences above "
            f"{_GRADIENT * comparison.coarser:.0%} of a gradient are seen."
        )


def _relative(apart: float, norm: float) -> str:
    return f"{apart / norm:.2g} times its norm" if norm else f"{apart:.2g}"


def _processes(ranks: Sequence[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
