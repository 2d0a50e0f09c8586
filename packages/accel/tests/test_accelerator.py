"""The Accelerator on one process: construction, training, gradients, and two side by side."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel.accelerator import Accelerator
from accel_data.config import DataLoaderConfiguration
from accel_optim.handlers import AutocastKwargs, GradScalerKwargs
from accel_state.enums import DistributedType
from accel_state.env import patch_environment
from accel_state.handlers import GradientAccumulationPlugin
from accel_state.parallelism.config import ParallelismConfig

pytestmark = pytest.mark.usefixtures("fresh_state")


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def make_data(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator)
    )


def train_plain(batch_size: int, steps: int, max_norm: float | None = None) -> list[torch.Tensor]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(make_data(), batch_size=batch_size)
    for (x, y), _ in zip(loader, range(steps), strict=False):
        torch.nn.functional.mse_loss(model(x), y).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_accel(
    accelerator: Accelerator, batch_size: int, max_norm: float | None = None
) -> list[torch.Tensor]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(make_data(), batch_size=batch_size)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            if accelerator.sync_gradients and max_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in accelerator.unwrap_model(model).parameters()]


def test_training_on_one_process_is_bit_identical_to_plain_pytorch():
    expected = train_plain(batch_size=4, steps=6, max_norm=0.1)

    actual = train_accel(Accelerator(), batch_size=4, max_norm=0.1)

    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_accumulation_over_equal_micro_batches_is_the_big_batch():
    expected = train_plain(batch_size=8, steps=3)

    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=False)
    actual = train_accel(Accelerator(gradient_accumulation_plugin=plugin), batch_size=4)

    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_attributes_of_a_fresh_accelerator():
    accelerator = Accelerator(gradient_accumulation_steps=3, mixed_precision="bf16")

    assert accelerator.distributed_type == DistributedType.NO
    assert accelerator.num_processes == 1
    assert accelerator.process_index == accelerator.local_process_index == 0
    assert accelerator.is_main_process
    assert accelerator.is_last_process
    assert not accelerator.use_distributed
    assert not accelerator.multi_device
    assert accelerator.device.type == "cpu"
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.gradient_accumulation_steps == 3
    assert accelerator.sync_gradients
    assert accelerator.step == 0
    assert accelerator.even_batches
    assert not accelerator.split_batches
    assert accelerator.dispatch_batches is None
    assert accelerator.scaler is None
    assert accelerator.fp8_backend is None
    assert not accelerator.is_fsdp2
    assert accelerator.parallelism_config is None
    assert accelerator.torch_device_mesh is None
    assert accelerator.should_save_model
    accelerator.gradient_accumulation_steps = 5
    assert accelerator.gradient_accumulation_steps == 5
    accelerator.even_batches = False
    assert not accelerator.even_batches


def test_two_accelerators_with_different_settings_live_side_by_side():
    first = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    second = Accelerator(mixed_precision="no", gradient_accumulation_steps=7)
    a = first.prepare(make_model())
    b = second.prepare(make_model())
    x = torch.randn(3, 4)

    assert (first.mixed_precision, second.mixed_precision) == ("bf16", "no")
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (2, 7)
    assert torch.equal(b(x), make_model()(x))
    assert not torch.equal(a(x), b(x))
    with first.accumulate(a):
        assert not first.sync_gradients
        assert second.sync_gradients


def test_bf16_computes_in_bf16_and_returns_fp32():
    accelerator = Accelerator(mixed_precision="bf16")
    seen = []

    class Probe(torch.nn.Linear):
        def forward(self, x):
            result = super().forward(x)
            seen.append(result.dtype)
            return result

    model = accelerator.prepare(Probe(4, 4))

    assert model(torch.randn(2, 4)).dtype is torch.float32
    assert seen == [torch.bfloat16]
    assert model.weight.dtype is torch.float32


def test_autocast_context_follows_the_precision_and_its_override():
    accelerator = Accelerator(mixed_precision="bf16")
    x = torch.randn(2, 2)

    with accelerator.autocast():
        assert (x @ x).dtype is torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (x @ x).dtype is torch.float32
    assert (x @ x).dtype is torch.float32


def test_a_mixed_precision_model_copies_pickles_and_unwraps():
    accelerator = Accelerator(mixed_precision="bf16")
    raw = make_model()
    model = accelerator.prepare(raw)
    x = torch.randn(2, 4)
    expected = model(x)

    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert plain is raw
    assert "forward" not in vars(plain)
    assert torch.equal(plain(x), make_model()(x))


def test_fp16_skips_a_step_with_infinite_gradients_and_says_so():
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    model, optimizer = make_model(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    accelerator.backward(model(torch.full((2, 4), float("inf"))).sum())
    optimizer.step()
    scheduler.step()

    assert accelerator.optimizer_step_was_skipped
    assert scheduler.get_last_lr() == [0.1]
    assert accelerator.scaler.get_scale() == 512.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    optimizer.zero_grad()
    accelerator.backward(model(torch.randn(2, 4)).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    optimizer.step()
    scheduler.step()

    assert norm <= 1.0 + 1e-4
    assert not accelerator.optimizer_step_was_skipped
    assert scheduler.get_last_lr() == [pytest.approx(0.01)]


def test_clipping_inside_a_window_leaves_the_partial_gradients_alone():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(make_model())
    x = torch.randn(4, 4)

    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum() * 100)
        before = [parameter.grad.clone() for parameter in model.parameters()]
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        accelerator.clip_grad_value_(model.parameters(), 0.01)
        after = [parameter.grad for parameter in model.parameters()]
    assert norm > 0.1
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum() * 100)
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
    total = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(total, torch.tensor(0.1), rtol=1e-4, atol=1e-6)
    accelerator.clip_grad_value_(model.parameters(), 0.01)
    assert max(parameter.grad.abs().max() for parameter in model.parameters()) <= 0.01


def test_the_norm_inside_an_fp16_window_is_that_of_the_unscaled_gradients():
    accelerator = Accelerator(
        mixed_precision="fp16",
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
    )
    model = torch.nn.Linear(2, 1, bias=False)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == 2.5


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_clipping_without_gradients_does_nothing(precision):
    accelerator = Accelerator(mixed_precision=precision)
    model = make_model()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.clip_grad_value_(model.parameters(), 1.0)
    accelerator.clip_grad_value_(model[0].weight, 1.0)
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == 0


def test_the_trigger_is_lowered_by_the_check():
    accelerator = Accelerator()

    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


def test_free_memory_forgets_everything_prepared():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.accumulate(model):
        pass
    assert accelerator.step == 1

    model, optimizer = accelerator.free_memory(model, optimizer)

    assert model is None
    assert optimizer is None
    assert accelerator.step == 0
    assert accelerator.run.prepared.models == accelerator.run.prepared.optimizers == []
    assert accelerator.clear() == []


def test_get_state_dict_has_the_names_of_the_raw_model():
    accelerator = Accelerator(mixed_precision="bf16")
    raw = make_model()
    expected = {name: value.clone() for name, value in raw.state_dict().items()}

    actual = accelerator.get_state_dict(accelerator.prepare(raw))

    assert list(actual) == list(expected)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_old_spellings_still_work_and_warn():
    with pytest.warns(FutureWarning, match=r"mixed_precision='fp16'"):
        assert Accelerator(fp16=True).mixed_precision == "fp16"
    with pytest.warns(FutureWarning, match=r"mixed_precision='no'"):
        assert Accelerator(fp16=False).mixed_precision == "no"
    with pytest.warns(FutureWarning, match="DataLoaderConfiguration"):
        assert not Accelerator(even_batches=False).even_batches
    with pytest.warns(FutureWarning, match="ProjectConfiguration"):
        assert Accelerator(logging_dir="logs").logging_dir == "logs"
    assert Accelerator(split_batches=True).split_batches


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixed_precision": "fp17"}, "fp17"),
        ({"dynamo_backend": "inductr"}, "(?i)inductor"),
        ({"rng_types": ["torchy"]}, "torchy"),
        ({"gradient_accumulation_steps": 0}, "0"),
        ({"gradient_accumulation_steps": 2.5}, "2.5"),
        ({"log_with": "tensorbord", "project_dir": "."}, "tensorboard"),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(2)},
            "pass one",
        ),
        (
            {"split_batches": False, "dataloader_config": DataLoaderConfiguration(split_batches=True)},
            "dataloader_config alone",
        ),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, "two AutocastKwargs"),
        ({"parallelism_config": ParallelismConfig(dp_replicate_size=2)}, r"2.*1"),
    ],
)
def test_wrong_values_are_named_with_the_fix(arguments, message):
    with pytest.raises(ValueError, match=message):
        Accelerator(**arguments)


def test_wrong_kinds_are_named_with_the_fix():
    with pytest.raises(TypeError, match=r"'mixed_precison'.*'mixed_precision'"):
        Accelerator(mixed_precison="bf16")
    with pytest.raises(TypeError, match="kwargs_handlers"):
        Accelerator(kwargs_handlers=[object()])


def test_what_needs_something_else_first_says_so():
    accelerator = Accelerator()
    with pytest.raises(ValueError, match="needs the prepared model"):
        accelerator.deepspeed_ulysses_dl_adapter([], make_model())
    with pytest.raises(RuntimeError, match="parallelism_config"):
        _ = accelerator.tensor_parallel_rank


def test_a_model_with_fp16_parameters_is_rejected_under_fp16():
    accelerator = Accelerator(mixed_precision="fp16")
    with pytest.raises(ValueError, match=r"0\.weight is float16"):
        accelerator.prepare(make_model().half())


@pytest.mark.parametrize(
    ("method", "item", "message"),
    [
        ("prepare_model", "x", r"prepare_model takes a torch.nn.Module, not str \('x'\)"),
        ("prepare_optimizer", torch.nn.Linear(1, 1), "prepare_optimizer takes an optimizer .*not Linear"),
        ("prepare_scheduler", "s", r"prepare_scheduler takes what has a step method, not str \('s'\)"),
    ],
)
def test_an_object_of_another_kind_is_named_as_what_it_is(method, item, message):
    with pytest.raises(TypeError, match=message):
        getattr(Accelerator(), method)(item)


def test_verify_device_map():
    model = make_model()
    assert not Accelerator().verify_device_map(model)
    model.hf_device_map = {"0": 0, "2": "cpu"}
    assert Accelerator().verify_device_map(model)
    with pytest.raises(ValueError, match="hf_device_map"):
        Accelerator().prepare(model)


def test_clipping_one_of_two_fp16_models_leaves_the_scaled_gradients_of_the_other():
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    generator, judge, first, second = accelerator.prepare(*models, *optimizers)
    x = torch.randn(3, 4)

    accelerator.backward(judge(generator(x)).mean())  # writes gradients of both
    accelerator.clip_grad_norm_(generator.parameters(), 1e9)
    first.step()
    second.zero_grad()
    accelerator.backward(judge(x).mean())
    norm = accelerator.clip_grad_norm_(judge.parameters(), 1e9)

    expected = torch.autograd.grad(judge(x).mean(), list(judge.parameters()))
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(expected), rtol=1e-2, atol=0)


def test_unscale_takes_an_optimizer_prepared_or_raw_and_names_another():
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    model = make_model()
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = accelerator.prepare(model, raw)
    accelerator.backward(model(torch.ones(1, 4)).sum())
    accelerator.unscale_gradients(raw)

    assert model[2].bias.grad.item() == pytest.approx(1.0)
    with pytest.raises(ValueError, match="SGD is not prepared"):
        accelerator.unscale_gradients(torch.optim.SGD(make_model().parameters(), lr=0.1))


def test_a_model_shared_between_precisions_changes_with_a_warning():
    model = make_model()
    Accelerator(mixed_precision="bf16").prepare(model)
    x = torch.randn(3, 4)

    Accelerator(mixed_precision="bf16").prepare(model)
    with pytest.warns(UserWarning, match="'bf16', and computes with 'no' from now on"):
        Accelerator(mixed_precision="no").prepare(model)
    assert torch.equal(model(x), make_model()(x))


@pytest.mark.parametrize("steps", [0, 2.5, "4", True])
def test_the_number_of_accumulation_steps_is_checked_when_it_is_changed(steps):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=f"gradient_accumulation_steps is {steps!r}"):
        accelerator.gradient_accumulation_steps = steps
    assert accelerator.gradient_accumulation_steps == 2


def test_parallelism_that_is_not_built_is_rejected_wherever_it_is_requested():
    with pytest.raises(TypeError, match="takes a TorchTensorParallelPlugin"):
        Accelerator(torch_tp_plugin=object())
    with (
        patch_environment(ACCELERATE_USE_PARALLELISM_CONFIG="true", PARALLELISM_CONFIG_DP_REPLICATE_SIZE="2"),
        pytest.raises(ValueError, match=r"2.*1"),
    ):
        Accelerator()


def test_one_skipped_optimizer_of_two_is_a_skipped_step():
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    *models, first, second = accelerator.prepare(*models, *optimizers)
    good, bad = torch.ones(1, 2), torch.full((1, 2), float("inf"))
    for model, x in zip(models, (good, bad), strict=True):
        accelerator.backward(model(x).sum())
    first.step()
    second.step()

    assert (first.step_was_skipped, second.step_was_skipped) == (False, True)
    assert accelerator.optimizer_step_was_skipped


def test_an_optimizer_with_fp16_parameters_is_rejected_under_fp16():
    parameters = [torch.nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in (torch.float32, torch.float16)]
    with pytest.raises(ValueError, match=r"SGD\.param_groups\[0\]\['params'\]\[1\] is float16.*unscaled"):
        Accelerator(mixed_precision="fp16").prepare(torch.optim.SGD(parameters))
    Accelerator(mixed_precision="bf16").prepare(torch.optim.SGD(parameters))


def fp16_model() -> tuple[Accelerator, torch.nn.Module, torch.optim.Optimizer]:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    model = accelerator.prepare(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.backward(model(torch.ones(1, 4)).sum())
    return accelerator, model, optimizer


def test_clipping_gradients_that_nobody_unscales_is_rejected():
    accelerator, model, _ = fp16_model()
    with pytest.raises(ValueError, match=r"4 of the 4 gradients.*no prepared optimizer.*prepare\(\)"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ValueError, match="no prepared optimizer"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)


@pytest.mark.parametrize("first", ["torch", "accelerator", "clip"])
def test_gradients_are_unscaled_once_however_it_is_requested(first):
    accelerator, model, raw = fp16_model()
    optimizer = accelerator.prepare(raw)
    if first == "torch":
        accelerator.scaler.unscale_(raw)
    elif first == "accelerator":
        accelerator.unscale_gradients(raw)
    else:
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
    accelerator.clip_grad_norm_(model.parameters(), 1e9)
    accelerator.unscale_gradients()
    accelerator.clip_grad_value_(model.parameters(), 1e9)

    assert model[2].bias.grad.item() == pytest.approx(1.0)
    before = model[2].bias.item()
    optimizer.step()
    assert model[2].bias.item() == pytest.approx(before - 0.1)
