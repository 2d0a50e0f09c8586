"""Engines: the registry, and DDP on real gloo workers."""

from __future__ import annotations

import datetime

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from accel.accelerator import Accelerator
from accel.engines import ENGINES, Engine, find_engine
from accel.engines.ddp import DDPEngine
from accel.engines.single import SingleEngine
from accel_ops.debug.check_collectives import DistributedOperationException
from accel_optim.handlers import DistributedDataParallelKwargs, GradScalerKwargs
from accel_state.enums import DistributedType
from accel_state.env import patch_environment
from accel_state.handlers import GradientAccumulationPlugin, InitProcessGroupKwargs, TorchDynamoPlugin

pytestmark = pytest.mark.usefixtures("fresh_state")


def make_model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).to(dtype)


def make_data(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, 3, dtype=torch.float64, generator=generator),
        torch.randn(count, 1, dtype=torch.float64, generator=generator),
    )


def test_every_row_leads_to_an_engine():
    for name, row in ENGINES.items():
        if not row.needs:  # the libraries of others may be missing
            assert issubclass(find_engine(name), Engine)
    assert find_engine("single") is SingleEngine
    assert find_engine("ddp") is DDPEngine
    with pytest.raises(ValueError, match="no engine 'dpp'; there are single, ddp, fsdp1"):
        find_engine("dpp")


@pytest.mark.parametrize(
    ("kind", "missing", "extra"),
    [
        ("DEEPSPEED", "deepspeed", "deepspeed"),
        ("MEGATRON_LM", "megatron.core", "megatron"),
        ("XLA", "torch_xla", "xla"),
    ],
)
def test_an_engine_whose_library_is_missing_is_rejected_by_name(monkeypatch, kind, missing, extra):
    monkeypatch.setattr("accel.engines.is_package_available", lambda module: False)
    with pytest.raises(ImportError, match=rf"{kind} engine.*{missing}.*'\./packages/accel\[{extra}\]'"):
        find_engine(kind.lower())


def test_a_log_line_says_which_engine_was_chosen_and_why(caplog):
    with caplog.at_level("INFO", logger="accel.engines"):
        with patch_environment(ACCELERATE_USE_FSDP="false"):
            Accelerator(cpu=True)
        with patch_environment(
            ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", ACCELERATE_MIXED_PRECISION="bf16"
        ):
            accelerator = Accelerator(cpu=True)
            Accelerator(cpu=True, mixed_precision="no", fsdp_plugin=accelerator.state.fsdp_plugin)
    accelerator.end_training()

    first, second, third = [record.getMessage() for record in caplog.records]
    assert first.startswith(
        "engine single, because of the number of processes; 1 process(es) on cpu, mesh none;"
    )
    assert first.endswith("precision no, because of the default")
    assert second.startswith(
        "engine fsdp2, because of ACCELERATE_USE_FSDP; 1 process(es) on cpu, mesh dp_shard=1"
    )
    assert second.endswith("precision bf16, because of ACCELERATE_MIXED_PRECISION")
    assert third.startswith("engine fsdp2, because of fsdp_plugin;")
    assert third.endswith("precision no, because of mixed_precision")


def train(
    global_batch: int, accumulation: int, max_norm: float | None
) -> tuple[list[float], list[torch.Tensor]]:
    """Train on this world's shard of fixed global batches; returns global losses and the final parameters."""
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    micro = global_batch // accelerator.num_processes // accumulation
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(make_data(), batch_size=micro)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, window = [], []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                window.append(accelerator.reduce(loss.detach(), "mean").item())
                if accelerator.sync_gradients:
                    losses.append(sum(window) / len(window))
                    window = []
                    if max_norm is not None:
                        losses.append(float(accelerator.clip_grad_norm_(model.parameters(), max_norm)))
                optimizer.step()
                optimizer.zero_grad()
    return losses, [parameter.detach() for parameter in accelerator.unwrap_model(model).parameters()]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_does_not_depend_on_the_number_of_processes(world, size, accumulation):
    losses, parameters = train(24, 1, 0.05)

    for other_losses, other_parameters in world.run(train, 24, accumulation, 0.05, size=size):
        assert other_losses == pytest.approx(losses, rel=1e-10)
        for a, b in zip(other_parameters, parameters, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def check_wrapping() -> None:
    accelerator = Accelerator()
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    assert isinstance(accelerator.engine, DDPEngine)
    raw, frozen = make_model(), make_model().requires_grad_(False)
    model = accelerator.prepare(raw)
    assert isinstance(model, DistributedDataParallel)
    assert accelerator.prepare(raw) is model
    assert accelerator.prepare(model) is model
    assert accelerator.unwrap_model(model) is raw
    assert list(accelerator.get_state_dict(model)) == list(raw.state_dict())
    assert next(iter(accelerator.get_state_dict(model, unwrap=False))).startswith("module.")
    assert accelerator.prepare(frozen) is frozen
    assert accelerator.prepare_model(make_model(), evaluation_mode=True).__class__ is torch.nn.Sequential


def test_ddp_wraps_what_trains_and_only_that(world):
    world.run(check_wrapping)


def check_options() -> tuple:
    handler = DistributedDataParallelKwargs(
        find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=3, comm_hook="fp16"
    )
    accelerator = Accelerator(kwargs_handlers=[handler])
    model = accelerator.prepare(make_model(torch.float32))
    accelerator.backward(model(torch.randn(2, 3)).sum())
    gradient = next(model.parameters()).grad
    return (
        model.find_unused_parameters,
        model.gradient_as_bucket_view,
        model.bucket_bytes_cap // 2**20,
        bool(torch.equal(gradient, gradient.half().float())),
        accelerator.gather(gradient.flatten()[:1]).tolist(),
    )


def test_ddp_options_and_communication_hook_reach_ddp(world):
    a, b = world.run(check_options)
    assert a[:4] == (True, True, 3, True)
    assert a[4] == b[4]
    assert a[4][0] == a[4][1]


def gradients_with(context: str) -> list:
    accelerator = Accelerator()
    model = accelerator.prepare(make_model())
    x = torch.full((2, 3), float(accelerator.process_index + 1), dtype=torch.float64)
    if context == "no_sync":
        with accelerator.no_sync(model):
            accelerator.backward(model(x).sum())
    elif context == "trigger":
        with accelerator.no_sync(model):
            first, second = model(x).sum(), model(2 * x).sum()
            accelerator.backward(first)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
    else:
        accelerator.backward(model(x).sum() + model(2 * x).sum())
    return next(model.parameters()).grad.flatten().tolist()


def test_no_sync_keeps_gradients_apart_and_the_trigger_brings_them_together(world):
    apart = world.run(gradients_with, "no_sync")
    assert apart[0] != apart[1]

    together = world.run(gradients_with, "trigger")
    expected = world.run(gradients_with, "plain")
    assert together[0] == pytest.approx(together[1], rel=1e-12)
    assert together[0] == pytest.approx(expected[0], rel=1e-12)


def gradients_in_a_window(sync_each_batch: bool) -> list[list[float]]:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=sync_each_batch)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    first, second = accelerator.prepare(make_model(), make_model())
    x = torch.full((2, 3), float(accelerator.process_index + 1), dtype=torch.float64)
    seen = []
    for _ in range(2):
        with accelerator.accumulate(first, second):
            accelerator.backward(first(x).sum() + second(x).sum())
        seen.append([float(next(model.parameters()).grad.sum()) for model in (first, second)])
    return seen


def test_accumulate_exchanges_gradients_of_all_its_models_at_the_end_of_the_window_alone(world):
    (inside, end), (other_inside, other_end) = world.run(gradients_in_a_window, False)
    assert all(a != pytest.approx(b) for a, b in zip(inside, other_inside, strict=True))
    assert end == pytest.approx(other_end, rel=1e-12)

    mine, others = world.run(gradients_in_a_window, True)
    assert mine[0] == pytest.approx(others[0], rel=1e-12)
    assert mine[1] == pytest.approx(end, rel=1e-12)


def groups_after_end_training() -> list[bool]:
    accelerator = Accelerator()
    before = torch.distributed.is_initialized()
    accelerator.wait_for_everyone()  # gloo cannot connect to a process that has ended its group already
    accelerator.end_training()
    after = torch.distributed.is_initialized()
    accelerator.end_training()
    return [before, after]


def test_end_training_leaves_the_process_group(world):
    assert world.run(groups_after_end_training) == [[True, False]] * 2


def check_trigger_refused() -> None:
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    model = accelerator.prepare(make_model())
    with (
        pytest.raises(ValueError, match="find_unused_parameters"),
        accelerator.trigger_sync_in_backward(model),
    ):
        pass
    with accelerator.trigger_sync_in_backward(make_model()):
        pass


def test_the_trigger_is_rejected_where_ddp_searches_unused_parameters(world):
    world.run(check_trigger_refused)


def train_uneven(even_batches: bool | None) -> tuple[int, list[float]]:
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(make_data(9), batch_size=2)  # the last sample alone cannot be spread over two
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    count = 0
    with accelerator.join_uneven_inputs([model], even_batches=even_batches):
        for x, y in loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            count += 1
    assert accelerator.even_batches
    assert loader.batch_sampler.even_batches
    return count, next(model.parameters()).flatten().tolist()


def test_join_uneven_inputs(world):
    counts = [count for count, _ in world.run(train_uneven, None)]
    assert counts == [3, 3]

    (first, a), (second, b) = world.run(train_uneven, False)
    assert (first, second) == (3, 2)
    assert a == b


def test_join_has_no_effect_on_one_process():
    accelerator = Accelerator()
    with accelerator.join_uneven_inputs([make_model()]):
        pass


def check_collectives() -> None:
    accelerator = Accelerator()
    rank, size = accelerator.process_index, accelerator.num_processes
    assert accelerator.gather(torch.tensor([rank])).tolist() == list(range(size))
    assert accelerator.reduce(torch.tensor([1.0 + rank]), "sum").item() == sum(range(1, size + 1))
    assert accelerator.reduce(torch.tensor([1.0 + rank]), "max").item() == size
    padded = accelerator.pad_across_processes(torch.ones(rank + 1), pad_index=7)
    assert padded.tolist() == [1.0] * (rank + 1) + [7.0] * (size - rank - 1)
    if rank == size - 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()
    with accelerator.split_between_processes(list(range(5))) as mine:
        assert sum(accelerator.gather(torch.tensor([len(mine)])).tolist()) == 5
    order = []
    with accelerator.main_process_first():
        order.append(rank)
    accelerator.wait_for_everyone()
    assert accelerator.on_main_process(lambda: rank)() == (0 if rank == 0 else None)


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_and_control_through_the_accelerator(world, size):
    world.run(check_collectives, size=size)


def fp16_step(poison: bool) -> tuple[bool, float, list[float]]:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=64.0)])
    model = make_model(torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.full((1, 3), float("inf") if poison and accelerator.is_last_process else 0.5)
    accelerator.backward(model(x).sum())
    optimizer.step()
    return (
        accelerator.optimizer_step_was_skipped,
        accelerator.scaler.get_scale(),
        next(model.parameters()).flatten().tolist(),
    )


def test_an_overflow_on_one_rank_skips_the_step_on_all(world):
    a, b = world.run(fp16_step, True)
    assert a == b
    assert a[0]
    a, b = world.run(fp16_step, False)
    assert a == b
    assert not a[0]


def debug_mismatch(kind: str) -> str:
    accelerator = Accelerator()
    with accelerator.main_process_first():  # the processes wait on different lines, as they should
        pass

    def disagree() -> None:
        if kind == "gather":
            accelerator.gather(torch.zeros(2 + accelerator.process_index))
        elif accelerator.is_main_process:
            accelerator.wait_for_everyone()
        else:
            accelerator.reduce(torch.zeros(2))

    with pytest.raises(DistributedOperationException) as caught:
        disagree()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["gather", "wait_for_everyone"])
def test_debug_mode_names_ranks_and_places_through_the_accelerator(world, kind):
    for message in world.run(debug_mismatch, kind, env={"ACCELERATE_DEBUG_MODE": "true"}):
        assert f"process 0: {kind}" in message
        assert "test_engines.py" in message


def check_late_wrapping() -> None:
    accelerator = Accelerator()
    frozen = accelerator.prepare(make_model().requires_grad_(False))
    evaluated = accelerator.prepare_model(make_model(), evaluation_mode=True)
    assert not isinstance(frozen, DistributedDataParallel)
    assert accelerator.prepare_model(evaluated, evaluation_mode=True) is evaluated
    frozen.requires_grad_(True)
    for raw in (frozen, evaluated):
        model = accelerator.prepare(raw)
        assert isinstance(model, DistributedDataParallel)
        assert accelerator.prepare(raw) is accelerator.prepare(model) is model
    assert len(accelerator.run.prepared.models) == 2


def test_a_model_that_begins_to_train_is_wrapped_when_it_is_prepared_again(world):
    world.run(check_late_wrapping)


def accumulated(static_graph: bool) -> list[float]:
    handler = DistributedDataParallelKwargs(static_graph=static_graph)
    accelerator = Accelerator(gradient_accumulation_steps=2, kwargs_handlers=[handler])
    model = accelerator.prepare(make_model())
    for number in range(4):
        x = torch.full((2, 3), float(accelerator.process_index + number), dtype=torch.float64)
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
    return next(model.parameters()).grad.flatten().tolist()


def test_a_static_graph_accumulates(world):
    (expected, _), (a, b) = world.run(accumulated, False), world.run(accumulated, True)
    assert a == b == pytest.approx(expected, rel=1e-12)


def join_others() -> str:
    accelerator = Accelerator()
    frozen = accelerator.prepare(make_model().requires_grad_(False))
    for joinables in ([], [frozen]):
        with accelerator.join_uneven_inputs(joinables):
            pass
    with pytest.raises(TypeError) as caught:
        accelerator.join_uneven_inputs(
            [accelerator.prepare(torch.optim.SGD(make_model().parameters()))]
        ).__enter__()
    return str(caught.value)


def test_join_leaves_out_what_has_no_collectives_and_rejects_the_rest(world):
    for message in world.run(join_others):
        assert "got a SGD" in message
        assert "Leave it out" in message


def keys_of_a_compiled_model(folder: str) -> tuple[list[str], bool]:
    accelerator = Accelerator()
    compiled = torch.compile(make_model(), backend="eager")
    model = accelerator.prepare(compiled)
    assert accelerator.prepare(compiled) is model
    accelerator.save_state(folder)
    before = model(torch.ones(1, 3, dtype=torch.float64))
    with torch.no_grad():
        next(model.parameters()).zero_()
    accelerator.load_state(folder)
    return list(accelerator.get_state_dict(model)), torch.equal(
        before, model(torch.ones(1, 3, dtype=torch.float64))
    )


def test_a_compiled_model_is_saved_under_its_own_names(world, tmp_path):
    expected = list(make_model().state_dict())
    assert keys_of_a_compiled_model(str(tmp_path / "one")) == (expected, True)
    for found in world.run(keys_of_a_compiled_model, str(tmp_path / "two")):
        assert found == (expected, True)


def seconds_until_the_group_gives_up() -> float:
    Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=123))])
    group = torch.distributed.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_options_of_the_process_group_reach_it(world):
    assert world.run(seconds_until_the_group_gives_up, init=False) == [123, 123]


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_gradients_are_clipped_by_their_true_value(precision):
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=[GradScalerKwargs(init_scale=64.0)])
    model = torch.nn.Linear(2, 1, bias=False)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.tensor([[0.25, 4.0]])).sum())
    accelerator.clip_grad_value_(model.parameters(), 1.0)

    assert model.weight.grad.tolist() == [[0.25, 1.0]]


class GraphBreak(torch.nn.Linear):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def test_options_of_torch_compile_reach_it():
    x = torch.ones(1, 2)
    plugin = TorchDynamoPlugin(backend="eager", fullgraph=True)
    strict = Accelerator(dynamo_plugin=plugin).prepare(GraphBreak(2, 1))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        strict(x)

    model = GraphBreak(2, 1)
    assert torch.equal(Accelerator(dynamo_backend="eager").prepare(model)(x), model(x))
