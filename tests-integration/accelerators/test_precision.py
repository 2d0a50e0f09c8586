"""Mixed precision on the device: bf16, fp16 with a scaler that meets a real overflow, and fp8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.precision.fp8.ao import has_ao_layers
from accel.precision.fp8.recipes import AORecipeKwargs
from accel_optim.handlers import GradScalerKwargs
from accel_world.devices import on_devices

pytestmark = pytest.mark.usefixtures("fresh_state")

WIDTH, ROWS, STEPS = 32, 32, 20  # multiples of 16, as fp8 needs them on a GPU
TOLERANCE = 0.05  # between losses, which fall from 1.2 to less than 0.3


class Net(torch.nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embed = torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 64), torch.nn.Linear(64, WIDTH)
        self.head = torch.nn.Linear(WIDTH, WIDTH)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        hidden = self.up(x)
        self.seen.add(hidden.dtype)
        return self.head(x + self.down(torch.tanh(hidden)))


def accelerator_on(device: str, precision: str, *handlers: Any) -> Accelerator:
    return Accelerator(cpu=device == "cpu", mixed_precision=precision, kwargs_handlers=list(handlers))


def data(device: torch.device) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)


def losses(device: str, precision: str, *handlers: Any) -> tuple[list[float], Net]:
    accelerator = accelerator_on(device, precision, *handlers)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    x = data(accelerator.device)
    found: list[float] = []
    for _ in range(STEPS):
        out = model(x)
        assert out.dtype is torch.float32
        loss = (out - x.roll(1, -1)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    accelerator.end_training()
    accelerator.free_memory()
    return found, accelerator.unwrap_model(model)


@pytest.fixture(scope="module")
def in_fp32() -> list[float]:
    """Losses of a plain loop on the CPU."""
    model, x = Net(), data(torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(STEPS):
        loss = (model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found[-1] < found[0] / 4
    return found


@on_devices
@pytest.mark.parametrize(
    ("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_losses_are_those_of_fp32(
    device: str, precision: str, dtype: torch.dtype, in_fp32: list[float]
) -> None:
    found, model = losses(device, precision)

    assert model.seen == {dtype}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    # The first steps of fp16 may overflow with the scale that torch begins with; none does here.
    assert found == pytest.approx(in_fp32, abs=1e-3 if precision == "no" else TOLERANCE)


@on_devices
@pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning")  # torchao's call
def test_losses_of_fp8_are_those_of_fp32(device: str, in_fp32: list[float]) -> None:
    pytest.importorskip("torchao.float8", reason="torchao is not installed")
    if device == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip(f"no fp8 in hardware of capability {torch.cuda.get_device_capability()}, 8.9 is needed")

    found, model = losses(device, "fp8", AORecipeKwargs())

    assert has_ao_layers(model)
    assert {type(layer).__name__ for layer in (model.up, model.down)} == {"Float8Linear"}
    assert found == pytest.approx(in_fp32, abs=TOLERANCE)


@on_devices
def test_a_real_overflow_skips_steps_and_the_scale_outlives_the_process(device: str, tmp_path: Path) -> None:
    first = 2.0**30  # times gradients of about 0.01: far above 65504, the largest number of fp16
    accelerator = accelerator_on(
        device, "fp16", GradScalerKwargs(init_scale=first, growth_interval=1000, backoff_factor=0.25)
    )
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    x = data(accelerator.device)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    skipped: list[bool] = []
    for _ in range(STEPS):
        accelerator.backward((model(x) - x.roll(1, -1)).square().mean())
        optimizer.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        same = all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
        assert same is all(skipped)
        optimizer.zero_grad()
    overflows = sum(skipped)
    assert 1 <= overflows < 10
    assert skipped == [True] * overflows + [False] * (STEPS - overflows)
    scale = first * 0.25**overflows
    assert accelerator.scaler.get_scale() == scale

    accelerator.save_state(str(tmp_path / "state"))
    saved = torch.load(tmp_path / "state/scaler.pt", weights_only=True)
    assert saved["scale"] == scale
    assert saved["_growth_tracker"] == STEPS - overflows
    trained = [parameter.detach().clone() for parameter in model.parameters()]
    accelerator.scaler.update(8.0)
    accelerator.load_state(str(tmp_path / "state"))
    assert accelerator.scaler.state_dict() == saved
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), trained, strict=True))

    accelerator.backward((model(x) - x.roll(1, -1)).square().mean())
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    assert accelerator.scaler.get_scale() == scale
