"""fp16 where processes have shards of gradients: all skip the same steps, and use the same scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_optim.handlers import GradScalerKwargs
from accel_state.parallelism.config import ParallelismConfig

SCALE = 64.0


class Pair(torch.nn.Module):
    _tp_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012 - as transformers' models have it

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def options(engine: str) -> dict[str, Any]:
    if engine == "tp":
        return {"parallelism_config": ParallelismConfig(tp_size=2)}
    version = int(engine[-1])
    own = {"use_orig_params": True} if version == 1 else {}
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=version, **own)}


def train(engine: str, fused: bool) -> list[Any]:
    """Four steps with clipping, of which the second overflows on the last process alone."""
    accelerator = Accelerator(
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=SCALE, growth_interval=2)],
        **options(engine),
    )
    model = Pair()
    # The second optimizer has a few elements, which under FSDP1 are all on one process.
    few = [model.down.bias]
    most = [parameter for parameter in model.parameters() if parameter is not few[0]]
    optimizers = [torch.optim.AdamW(most, 0.1, fused=fused), torch.optim.SGD(few, 0.1)]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    rank, size = accelerator.engine.data_parallel.rank_and_size
    seen: list[Any] = []
    for step in range(4):
        x = torch.linspace(-1, 1, 16).view(4, 4).chunk(size)[rank]
        if step == 1 and accelerator.is_last_process and engine != "tp":
            x = x * float("inf")
        out = model(x)
        accelerator.backward(out.square().mean())
        if step == 1 and engine == "tp" and accelerator.is_last_process:
            part = model.up.weight.grad
            part.to_local().fill_(float("inf"))
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        skipped = [optimizer.step_was_skipped for optimizer in optimizers]
        seen.append((skipped, accelerator.scaler.get_scale(), float(norm)))
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return [seen, {name: value.tolist() for name, value in state.items()}]


def expected() -> dict[str, torch.Tensor]:
    """The three steps that are not left out, in fp32."""
    model = Pair()
    few = [model.down.bias]
    most = [parameter for parameter in model.parameters() if parameter is not few[0]]
    optimizers = [torch.optim.AdamW(most, 0.1), torch.optim.SGD(few, 0.1)]
    for _ in range(3):
        model(torch.linspace(-1, 1, 16).view(4, 4)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(
    ("engine", "fused"), [("fsdp1", False), ("fsdp2", False), ("fsdp2", True), ("tp", False)]
)
def test_an_overflow_of_one_process_leaves_out_the_step_on_all(world, engine, fused):
    (seen, state), (other, _) = world.run(train, engine, fused)

    assert [step[0] for step in seen] == [step[0] for step in other]
    assert [step[0][0] for step in seen] == [False, True, False, False]
    assert [step[1] for step in seen] == [step[1] for step in other] == [64.0, 32.0, 32.0, 64.0]
    assert [step[2] for step in seen[::2]] == pytest.approx([step[2] for step in other[::2]], rel=1e-6)
    for name, value in expected().items():
        torch.testing.assert_close(torch.tensor(state[name]), value, rtol=5e-2, atol=5e-2)
