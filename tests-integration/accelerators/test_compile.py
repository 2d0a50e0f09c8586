"""Compiled blocks on the device compute what they compute uncompiled."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters

from accel import Accelerator
from accel.utils import TorchDynamoPlugin
from accel_ops.modules import has_compiled_regions
from accel_world.devices import on_devices

pytestmark = [
    pytest.mark.usefixtures("fresh_state"),
    # dynamo asks every tensor for its gradient, and hides the warning from users but not from `error`.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),  # torch
    # inductor advises TF32 on GPUs that have it.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

WIDTH, STEPS = 32, 4


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.gelu(self.linear(self.norm(x)))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train(device: str, precision: str, plugin: TorchDynamoPlugin | None) -> list[float]:
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision, dynamo_plugin=plugin)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    assert has_compiled_regions(accelerator.unwrap_model(model, keep_torch_compile=True)) is (
        plugin is not None
    )
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)).to(accelerator.device)
    losses = []
    for _ in range(STEPS):
        loss = (model(x) - x.roll(1, -1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.free_memory()
    return losses


@on_devices
@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-4), ("bf16", 2e-2)])
@pytest.mark.long
@torch._inductor.config.patch(compile_threads=1)  # its threads would stay
def test_regions_give_the_losses_of_eager_blocks(device: str, precision: str, tolerance: float) -> None:
    torch._dynamo.reset()
    counters.clear()
    compiled = train(device, precision, TorchDynamoPlugin(backend="inductor", use_regional_compilation=True))
    assert counters["inductor"], "nothing reached inductor"
    torch._dynamo.reset()

    eager = train(device, precision, None)
    assert eager[-1] < eager[0]
    assert compiled == pytest.approx(eager, abs=tolerance)
