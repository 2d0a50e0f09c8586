"""Functions that compiled models call without a compiler looking into them."""

from __future__ import annotations

import subprocess
import sys

import torch

from accel.precision.outside_dynamo import call_outside_dynamo

calls: list[tuple[int, bool]] = []


def note(number: int) -> None:
    calls.append((number, torch.compiler.is_compiling()))


def test_a_function_is_called_as_ever() -> None:
    calls.clear()
    call_outside_dynamo(note, 1)

    assert calls == [(1, False)]


def test_a_compiled_function_calls_it_each_time() -> None:
    calls.clear()

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        call_outside_dynamo(note, 2)
        return y * 2

    for _ in range(3):
        assert compiled(torch.ones(1)).item() == 4
    torch._dynamo.reset()

    assert calls == [(2, False)] * 3  # a function that is traced is told that it is


def test_models_that_are_not_compiled_do_not_import_the_compiler() -> None:
    code = (
        "import sys, torch\n"
        "from torch import nn\n"
        "from accel import cpu_offload\n"
        "model = cpu_offload(nn.Linear(2, 2))\n"
        "model(torch.ones(1, 2))\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert said.stdout.strip() == "False"
