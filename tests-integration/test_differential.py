"""Random programs over the documented interface give under each engine what they give on plain PyTorch.

`hatch run differential` tries many more, for minutes.
"""

from __future__ import annotations

import hypothesis
import pytest

from differential.check import check
from differential.engines import ENGINES
from differential.program import MicroBatch, Program
from differential.trace import Trace, difference

# Of torch's newer names, in every collective of DeepSpeed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated:FutureWarning"
)


@pytest.mark.timeout(300)  # several launches of an engine each
@pytest.mark.parametrize("engine", ENGINES)
def test_random_programs_agree_with_plain_pytorch(world, engine):
    case = ENGINES[engine]

    @hypothesis.settings(
        max_examples=4,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],  # shrinking would take longer than the test may
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case.programs())
    def try_one(program: Program) -> None:
        outcome = check(world, program, engine, timeout_s=100)
        assert outcome.problem is None, f"{program}\n{outcome.problem}"

    try_one()


def test_a_difference_is_found_and_named():
    trace, expected = Trace(), Trace()
    trace.add("norm of micro-batch 0", 1.0)
    expected.add("norm of micro-batch 0", 1.0 + 1e-6)

    assert difference(trace, expected, 1e-9) == "norm of micro-batch 0: 1.0, expected 1.000001"
    assert difference(trace, expected, 1e-5) is None


def test_a_program_is_printed_as_it_is_written():
    program = Program(seed=3, tied=True, micro_batches=(MicroBatch("save"), MicroBatch("load", "give up")))

    assert eval(str(program)) == program
