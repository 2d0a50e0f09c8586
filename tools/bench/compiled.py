"""The step of a small transformer whose blocks are compiled one by one, compared with the same by hand."""

from __future__ import annotations

from statistics import median

import torch

from .devices import waiting
from .engines import WIDTH, make_transformer, size_of, step_by_accel, step_by_hand
from .row import Row
from .step import Contestant
from .timing import BASELINE, CONTROL, Samples, interleave, ratios, timed
from .workers import run_workers

__all__ = ["compiled_row", "measure_compiled"]

LIMIT = 1.03
EAGER = "eager"


def compiled_row(*, quick: bool = False, device: str = "cpu") -> Row:
    """Measure a step with compiled blocks, as a multiple of one whose blocks were compiled by hand."""
    samples: Samples = run_workers("compiled:measure_compiled", 1, rounds=3 if quick else 100, device=device)
    compared = ratios(samples)
    eager_ms, base_ms = (1e3 * median(samples[name]) for name in (EAGER, BASELINE))
    return Row(
        what=f"step of a transformer of {size_of(WIDTH)}, blocks compiled: time / the same by hand",
        value=compared["accel"].median,
        limit=LIMIT,
        noise=compared[CONTROL],
        base=f"{base_ms:.1f} ms, {eager_ms:.1f} ms without compiling",
    )


def measure_compiled(rank: int, size: int, rounds: int, device: str) -> Samples:
    """Time one step of each contestant; runs in a worker."""
    torch.set_num_threads(1)
    contestants = {
        BASELINE: _plain(device, compiles=True),
        CONTROL: _plain(device, compiles=True),
        EAGER: _plain(device, compiles=False),
        "accel": _accel(device),
    }
    measures = {name: timed(contestant.step, 2, waiting(device)) for name, contestant in contestants.items()}
    return interleave(measures, rounds=rounds, warmup=3)


def _plain(device: str, compiles: bool) -> Contestant:
    model = make_transformer(WIDTH).to(device)
    if compiles:
        for block in model.blocks:
            block.compile(backend="inductor")
    return step_by_hand(model, model, device)


def _accel(device: str) -> Contestant:
    from accel import Accelerator
    from accel.utils import TorchDynamoPlugin

    plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    return step_by_accel(Accelerator(cpu=device == "cpu", dynamo_plugin=plugin), WIDTH, device)
