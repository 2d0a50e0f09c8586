"""What engines cannot do is rejected at prepare, or reported as ignored, with the reason and the fix."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from accel.accelerator import Accelerator
from accel.engines.common.check_on_all_ranks import check_on_all_ranks
from accel.engines.common.checks import check_elementwise_optimizer
from accel.engines.common.layouts import check_layout, check_sparse
from accel.engines.deepspeed.settings import check_axes
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.engines.megatron.engine import MegatronLMEngine
from accel.engines.xla import XLAEngine
from accel.training.arguments import Handlers, warn_unread
from accel_ops.collectives import operations
from accel_optim.handlers import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs
from accel_optim.local_sgd import LocalSGD
from accel_state.handlers import TorchDynamoPlugin
from accel_state.parallelism.config import ParallelismConfig
from accel_world.report import WorldFailure
from accel_world.warned import warns_once

pytestmark = pytest.mark.usefixtures("fresh_state")


class Net(torch.nn.Module):
    """Two layers, the first one split by tensor parallelism, and parameters that are odd on demand."""

    def __init__(self, odd: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.norm = torch.nn.LayerNorm(4)  # whole under tensor parallelism
        self._tp_plan = {"up": "colwise", "down": "rowwise"}
        if odd == "scalar":
            self.gain = torch.nn.Parameter(torch.tensor(1.5))
        elif odd == "strided":
            self.down.weight = torch.nn.Parameter(torch.randn(8, 4).t())
        elif odd == "sparse":
            self.table = torch.nn.Embedding(4, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(x).relu()))


def make_accelerator(engine: str, **options: Any) -> Accelerator:
    if engine.startswith("fsdp"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=int(engine[-1]), use_orig_params=None)
        options["fsdp_plugin"] = plugin
    elif engine == "tp":
        options["parallelism_config"] = ParallelismConfig(tp_size=2)
    accelerator = Accelerator(cpu=True, **options)
    assert accelerator.engine.name == engine
    return accelerator


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "Muon": lambda model: torch.optim.Muon([model.up.weight, model.down.weight]),
}


def refused_optimizers(engine: str) -> dict[str, str]:
    """Messages by the optimizer's name; nothing is changed by them."""
    accelerator, messages = make_accelerator(engine), {}
    for name, make in OPTIMIZERS.items():
        model = Net()
        before = dict(model.named_parameters())
        try:
            accelerator.prepare(model, make(model))
        except ValueError as error:
            messages[name] = str(error)
            assert all(item is before[known] for known, item in model.named_parameters())
    return messages


@pytest.mark.parametrize(
    ("engine", "names"),
    [
        ("ddp", []),
        ("fsdp1", ["LBFGS", "Adafactor", "Muon"]),
        ("fsdp2", ["LBFGS", "Adafactor"]),
        ("tp", ["LBFGS", "Adafactor"]),
    ],
)
def test_optimizers_whose_steps_need_full_tensors_are_rejected_where_there_are_shards(world, engine, names):
    for messages in world.run(refused_optimizers, engine):
        assert list(messages) == names
        for name, message in messages.items():
            assert f"a step of {name} needs full" in message
            assert (
                f"{engine} shards them, so its steps would differ from unsharded training, or fail" in message
            )
            assert "AdamW" in message


class Adafactor(torch.optim.SGD):
    """Of a library: what transformers' is called, which needs whole matrices too."""


def test_an_optimizer_of_a_library_is_known_by_its_name():
    optimizer = type("Own", (Adafactor,), {})(Net().parameters())
    with pytest.raises(ValueError, match="Own: a step of Adafactor needs full matrices"):
        check_elementwise_optimizer(optimizer, ("LBFGS", "Adafactor"), "fsdp1")
    check_elementwise_optimizer(optimizer, (), "ddp")


def refused_layouts(engine: str) -> dict[str, str]:
    accelerator, messages = make_accelerator(engine), {}
    for odd in ("scalar", "strided", "sparse"):
        try:
            accelerator.prepare(Net(odd))
        except ValueError as error:  # noqa: PERF203
            messages[odd] = str(error)
    return messages


@pytest.mark.parametrize(
    ("engine", "names"),
    [
        ("ddp", []),
        ("fsdp1", ["scalar", "sparse"]),
        ("fsdp2", ["scalar", "strided", "sparse"]),
        ("tp", []),
    ],
)
def test_parameters_that_cannot_be_cut_are_rejected_by_name(world, engine, names):
    fixes = {
        "scalar": f"Net.gain cannot be prepared under {engine}: it has no dimension.*a vector of one element",
        "strided": r"Net.down.weight .*strides \(1, 4\).*contiguous",
        "sparse": "table of Net has sparse=True.*freeze it",
    }
    for messages in world.run(refused_layouts, engine):
        assert list(messages) == names
        for odd, message in messages.items():
            with pytest.raises(ValueError, match=fixes[odd]):
                raise ValueError(message)


def test_what_is_ignored_or_frozen_need_not_be_cut():
    model = Net("scalar")
    check_layout(model, "fsdp2", {model.gain})
    model = Net("sparse")
    check_sparse(model, "fsdp2", {model.table.weight})
    model.table.requires_grad_(False)
    check_sparse(model, "fsdp2")


def test_only_embeddings_make_sparse_gradients():
    model = Net()
    model.up.sparse = True  # a layer of the user's may mean anything by it
    check_sparse(model, "fsdp2")
    model.bag = torch.nn.EmbeddingBag(4, 4, sparse=True)
    with pytest.raises(ValueError, match="bag of Net has sparse=True"):
        check_sparse(model, "fsdp2")


def without_weights(engine: str) -> list[str]:
    accelerator, messages = make_accelerator(engine), []
    for bare in ((0, 1), (0,), (1,)):
        with torch.device("meta" if accelerator.process_index in bare else "cpu"):
            model = Net()
        try:
            accelerator.prepare(model)
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "tp"])
def test_a_model_without_weights_where_they_count_is_rejected_on_all_processes(world, engine):
    first, second = world.run(without_weights, engine)

    assert len(first) == len(second) == (2 if engine in ("fsdp2", "tp") else 3)
    for message in (*first, *second):
        assert message.startswith("Net has parameters or buffers")
        assert "the meta device on" in message
        assert "Load them there" in message
    assert "buffers (up.weight and 5 more) without values" in first[0]
    assert "buffers without values to start from: they are on the meta device on 1 of 2" in second[1]


@pytest.mark.parametrize(("is_persistent", "fix"), [(True, "Load them there"), (False, "compute them there")])
def test_a_buffer_without_values_is_missing_too(is_persistent, fix):
    model = Net()
    model.register_buffer("table", torch.empty(2, device="meta"), persistent=is_persistent)
    process = Accelerator(cpu=True).engine.context.process
    with check_on_all_ranks([(model, False)], "the first", process):
        pass
    with (
        pytest.raises(ValueError, match=rf"buffers \(table\) without values .*{fix}"),
        check_on_all_ranks([(model, True)], "the first", process),
    ):
        pass


def refused_on_one(engine: str) -> tuple[str, int]:
    """What the processes say when one rejects something; and the reductions of a call that succeeds."""
    accelerator = make_accelerator(engine)
    model = Net()
    if accelerator.is_main_process:
        model.hf_device_map = {"up": 0, "down": "cpu"}
    with pytest.raises(ValueError) as error:
        accelerator.prepare(model)
    with mock.patch.object(operations, "reduce", wraps=operations.reduce) as counted:
        accelerator.prepare(Net(), Net())
    return str(error.value), counted.call_count


def prepare_spread(evaluation_mode: bool) -> list[float]:
    """Train a model that a device map spreads over two devices; the names are those of GPUs."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(Net())
    model[0].hf_device_map = {"up": 0, "down": 1}  # of a part, as in a wrapper of another library
    assert accelerator.verify_device_map(model)
    prepared = accelerator.prepare_model(model, evaluation_mode=evaluation_mode)
    if not evaluation_mode:
        prepared(torch.full((1, 4), 1.0 + accelerator.process_index)).sum().backward()
    return [0.0 if p.grad is None else float(p.grad.sum()) for p in model.parameters()]


def test_a_model_spread_over_devices_is_trained_on_several_processes_only_when_requested(world):
    with pytest.raises(WorldFailure, match=r"over \['0', '1'\].*set ACCELERATE_BYPASS_DEVICE_MAP=true"):
        world.run(prepare_spread, False)
    first, second = world.run(prepare_spread, False, env={"ACCELERATE_BYPASS_DEVICE_MAP": "1"})
    assert first == second
    assert any(first)
    world.run(prepare_spread, True)  # evaluation shares nothing
    world.run(prepare_spread, False, size=1)


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "tp"])
def test_what_one_process_rejects_all_reject_in_one_reduction(world, engine):
    (first, reductions), (second, _) = world.run(refused_on_one, engine)

    assert "hf_device_map" in first
    assert "prepare failed on 1 of 2 processes, and not on this one" in second
    assert reductions == 1


def frozen_on_one() -> bool:
    accelerator = make_accelerator("ddp")
    if accelerator.is_main_process:
        return accelerator.prepare(Net().requires_grad_(False)).training
    return True


def test_a_frozen_model_may_be_prepared_on_one_process_alone(world):
    assert world.run(frozen_on_one) == [True, True]


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.arange(8.0).reshape(2, 4)).pow(4).sum()


def clipped_values() -> list[torch.Tensor]:
    accelerator = make_accelerator("tp")
    model = accelerator.prepare(Net())
    accelerator.backward(loss_of(model))
    assert not isinstance(model.norm.weight, DTensor)
    assert isinstance(model.up.weight, DTensor)
    accelerator.clip_grad_value_(model.parameters(), 0.5)
    accelerator.clip_grad_value_(model.norm.weight, 0.25)
    return [getattr(item.grad, "full_tensor", lambda own=item: own.grad)() for item in model.parameters()]


def test_values_are_clipped_where_some_weights_are_split(world):
    model = Net()
    loss_of(model).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    torch.nn.utils.clip_grad_value_(model.norm.weight, 0.25)

    for gradients in world.run(clipped_values):
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


def unread(engine: str) -> list[str]:
    handlers = [
        DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook="fp16", static_graph=True)
    ]
    with warns_once(UserWarning, "ignored") as told:
        make_accelerator(engine, kwargs_handlers=handlers)
    make_accelerator(engine, kwargs_handlers=[DistributedDataParallelKwargs(), GradScalerKwargs()])
    # As transformers' Trainer has it in every run: no user can leave it out, so that a log line must do.
    make_accelerator(engine, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    return told


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "tp"])
def test_options_of_ddp_are_reported_as_ignored_under_engines_without_it(world, engine):
    (message,), none = world.run(unread, engine)
    assert "DistributedDataParallelKwargs(static_graph=True, comm_hook=" in message
    assert f"is ignored under {engine}: gradients are reduced without" in message
    assert message.endswith("whose options can be left out.")
    assert none == []


def test_every_engine_names_the_handlers_that_it_does_not_read():
    handlers = Handlers(AutocastKwargs(enabled=False), scaler=GradScalerKwargs(init_scale=2.0))
    with pytest.warns(UserWarning, match="ignored") as told:
        warn_unread(handlers, SimpleNamespace(name="m", traits=MegatronLMEngine.traits))
    assert ["GradScalerKwargs(init_scale=2.0)" in str(item.message) for item in told] == [True, False]
    assert "AutocastKwargs(enabled=False)" in str(told[1].message)
    warn_unread(handlers, SimpleNamespace(name="xla", traits=XLAEngine.traits))


def test_what_the_trainer_always_passes_is_logged_and_not_warned_of(caplog):
    handlers = Handlers(ddp=DistributedDataParallelKwargs(find_unused_parameters=True))
    Accelerator(cpu=True)
    with caplog.at_level("INFO", logger="accel.training.arguments"):
        warn_unread(handlers, SimpleNamespace(name="xla", traits=XLAEngine.traits))
    (record,) = caplog.records
    assert "DistributedDataParallelKwargs(find_unused_parameters=True) is ignored under xla" in record.message


def test_compiling_under_megatron_is_rejected():
    context: Any = SimpleNamespace(
        settings=object(),
        dynamo=TorchDynamoPlugin(backend="inductor"),
        mesh=None,
        process=SimpleNamespace(rank=0, world_size=1),
    )
    with pytest.raises(ValueError, match=r"dynamo_backend=INDUCTOR under Megatron-LM.*Leave it out"):
        MegatronLMEngine(context)


def test_replicas_next_to_zero_are_reported_as_ignored():
    def check(config: ParallelismConfig | None, stage: int) -> None:
        check_axes(SimpleNamespace(parallelism=config), stage)

    config = ParallelismConfig(dp_replicate_size=2)
    with pytest.warns(UserWarning, match="dp_replicate_size=2 .* is ignored: stage 2 .*zero_stage=0"):
        check(config, 2)
    check(config, 0)
    check(ParallelismConfig(dp_replicate_size=2, sp_size=2), 2)
    check(None, 2)


def local_steps() -> str:
    accelerator = make_accelerator("tp")
    model = accelerator.prepare(Net())
    with pytest.raises(ValueError, match="LocalSGD") as error, LocalSGD(accelerator, model, 2):
        pass
    return str(error.value)


def test_local_steps_under_tensor_parallelism_say_what_is_missing(world):
    assert "tensor parallelism" in world.run(local_steps)[0]
