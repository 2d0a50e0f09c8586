"""Try many random programs under chosen engines, and print every one that differs.

`python tools/try_programs.py --minutes 10 fsdp2 tp`; without names, all engines in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter

import hypothesis

from accel_world.pool import World
from differential.check import check
from differential.engines import ENGINES
from differential.program import Program


def main() -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="*", help=f"any of {', '.join(ENGINES)}; default all")
    parser.add_argument("--minutes", type=float, default=1.0, help="for each engine")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.engines) - set(ENGINES)):
        parser.error(f"unknown engine {', '.join(unknown)}; there are {', '.join(ENGINES)}")
    world = World()
    try:
        seconds = 60 * arguments.minutes
        failed = [explore(world, name, seconds, arguments.seed) for name in arguments.engines or ENGINES]
    finally:
        world.close()
    return int(any(failed))


def explore(world: World, engine: str, seconds: float, seed: int) -> int:
    """Try programs under one engine for a time; prints what differs and returns how many did."""
    case, end = ENGINES[engine], time.monotonic() + seconds
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=1_000_000,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case.programs())
    def try_one(program: Program) -> None:
        if time.monotonic() > end:
            raise _TimeIsUp
        outcome = check(world, program, engine)
        counts["programs"] += 1
        for refusal in outcome.refusals:
            refused[f"{refusal.action}: {refusal.error[:300]}"] += 1
        if outcome.ended:
            refused[outcome.ended[:300]] += 1
        if outcome.problem is not None:
            counts["failed"] += 1
            print(f"--- {engine}: {program}\n{outcome.problem[-3000:]}", flush=True)

    with contextlib.suppress(_TimeIsUp):
        try_one()
    print(f"=== {engine}: {counts['programs']} programs, {counts['failed']} failed", flush=True)
    for text, count in refused.most_common():
        print(f"    refused {count} times: {text}", flush=True)
    return counts["failed"]


class _TimeIsUp(Exception):
    pass


if __name__ == "__main__":
    sys.exit(main())
