"""The launcher's flags of fp8, through to the settings of the library that computes in it."""

from __future__ import annotations

import pytest

from accel_state.imports.packages import install_hint

# Torch starts in every process, and the machine may be busy.
pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import torch
from torchao.float8.float8_linear import Float8Linear
from accel import Accelerator

accelerator = Accelerator()
layers = [torch.nn.Linear(16, 16) for _ in range(3)]
model = accelerator.prepare(torch.nn.Sequential(*layers))
accelerator.backward(model(torch.ones(16, 16)).square().mean())
config = model[1].config
print(accelerator.mixed_precision, accelerator.fp8_backend, [type(layer) is Float8Linear for layer in model])
print(config.pad_inner_dim, bool(model[1].weight.grad.isfinite().all()))
"""


def test_torchao_trains_with_the_settings_of_the_flags(launched):
    flags = ("--cpu", "--mixed_precision", "fp8", "--fp8_backend", "torchao", "--fp8_pad_inner_dim", "false")
    run = launched(SCRIPT, num_processes=1, launch_args=flags)

    assert run.returncode == 0
    assert run.stdout.splitlines()[-2:] == ["fp8 AO [False, True, False]", "False True"]


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("te", install_hint("transformer-engine")),
        ("msamp", "MS-AMP is not supported"),
    ],
)
def test_a_library_that_is_not_there_is_named_with_where_to_get_it(launched, backend, message):
    flags = ("--cpu", "--mixed_precision", "fp8", "--fp8_backend", backend)
    run = launched("from accel import Accelerator\nAccelerator()\n", num_processes=1, launch_args=flags)

    assert run.returncode != 0
    assert "ImportError" in run.stderr
    assert message in run.stderr
