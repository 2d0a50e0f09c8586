"""DeepSpeed with models of transformers: sharded while they are built, and Ulysses sequence parallelism."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from accel.accelerator import Accelerator
from accel.engines.deepspeed.config import HfDeepSpeedConfig
from accel.engines.deepspeed.plugin import DeepSpeedPlugin
from accel.engines.deepspeed.runtime import GatheredParameters
from accel.engines.deepspeed.ulysses import SequenceParallelLoader
from accel_state.parallelism.config import ParallelismConfig
from accel_state.parallelism.handlers import DeepSpeedSequenceParallelConfig

pytestmark = [
    pytest.mark.timeout(400),  # importing DeepSpeed and transformers on a busy machine
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings(  # of torch's newer names, in DeepSpeed's collectives
        "ignore:`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is dep:FutureWarning"
    ),
    pytest.mark.filterwarnings(  # in the loss that is documented for shared sequences
        "ignore:torch.distributed.nn.functional.all_gather is deprecated:FutureWarning"
    ),
]

VOCAB, LENGTH, COUNT = 17, 8, 16


def warm() -> None:
    # Each takes seconds, once in each worker.
    import deepspeed  # noqa: F401
    from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def _imported(world) -> None:
    world.run(warm, timeout_s=300, env={"DS_ACCELERATOR": "cpu"}, init=False)


def make_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


class Tokens(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[: index % 3] = -100
        return {"input_ids": tokens, "labels": labels, "position_ids": torch.arange(LENGTH)}


def config_of(stage: int) -> dict[str, Any]:
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "reduce_bucket_size": "auto",
    }
    return {"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}


# While it is built


def built_in_parts() -> tuple[bool, bool, tuple[int, ...], list[float], dict[str, Any]]:
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    plugin = DeepSpeedPlugin(config_of(3), zero3_save_16bit_model=True)
    accelerator = Accelerator(deepspeed_plugin=plugin)
    assert isinstance(plugin.dschf, HfDeepSpeedConfig)
    known = is_deepspeed_zero3_enabled()
    with plugin.zero3_init_context_manager(enable=False):
        unknown = is_deepspeed_zero3_enabled()
    expected = make_model_whole(plugin)
    model = type(expected)._from_config(expected.config)
    shape = tuple(model.lm_head.weight.shape)
    copy_weights(expected, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Tokens(), batch_size=2))
    losses = []
    for batch in itertools.islice(loader, 3):
        loss = token_loss(model, batch)
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        accelerator.backward(loss)
        optimizer.step()
    filled = plugin.deepspeed_config["zero_optimization"]
    accelerator.end_training()
    return known, unknown, shape, losses, filled


def make_model_whole(plugin: DeepSpeedPlugin) -> Any:
    with plugin.zero3_init_context_manager(enable=False):
        return make_model()


def copy_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    weights = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        with torch.no_grad(), GatheredParameters(parameter, modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                parameter.copy_(weights[name])


def token_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    targets = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def plain_mean(count: int) -> list[float]:
    """Steps on two batches of 2, each with its own mean, as processes have them."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, batches = [], iter(DataLoader(Tokens(), batch_size=2))
    for _ in range(count):
        pair = [token_loss(model, next(batches)) for _ in range(2)]
        (sum(pair) / 2).backward()
        losses.append(sum(loss.item() for loss in pair) / 2)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_model_is_sharded_while_it_is_built(world):
    for known, unknown, shape, losses, filled in world.run(built_in_parts, timeout_s=100):
        assert (known, unknown) == (True, False)
        assert shape == (0,)
        assert losses == pytest.approx(plain_mean(3), rel=1e-5)
        assert filled["reduce_bucket_size"] == 64
        assert filled["stage3_prefetch_bucket_size"] == 57
        assert filled["stage3_param_persistence_threshold"] == 80


def test_a_plugin_that_shards_nothing_while_building_takes_the_one_before_out_of_sight():
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    first, second = DeepSpeedPlugin(config_of(3)), DeepSpeedPlugin(config_of(2))
    first.selected = True
    assert is_deepspeed_zero3_enabled()
    second.selected = True
    assert not is_deepspeed_zero3_enabled()
    assert first.dschf is not None  # it is still there to be found


# Ulysses


def summed(model: Any, batch: dict[str, torch.Tensor], targets: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """The loss, summed over the tokens that count, and their number."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return loss, (targets != -100).sum()


def by_weight(accelerator: Accelerator, model: Any, batch: dict[str, torch.Tensor]) -> float:
    loss, count = summed(model, batch, batch["shift_labels"])
    accelerator.backward(loss, weight=count)  # the mean over the tokens of all processes
    return float(accelerator.reduce(loss.detach()) / accelerator.reduce(count))


def by_gathering(accelerator: Accelerator, model: Any, batch: dict[str, torch.Tensor]) -> float:
    """What is documented for existing scripts, and what transformers' Trainer does."""
    from deepspeed.utils import groups
    from torch.distributed.nn.functional import all_gather

    loss, count = summed(model, batch, batch["shift_labels"])
    group = groups._get_sequence_parallel_group()
    losses, counts = all_gather(loss / count, group=group), all_gather(count, group=group)
    loss = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    accelerator.backward(loss)
    return loss.item()


LOSSES = {"weight": by_weight, "gather": by_gathering}


def with_sequences_shared(
    config: dict[str, Any], kind: str, window: int, together: bool = True, precision: str = "no"
) -> dict[str, Any]:
    """Train by SGD, which shows by how much gradients are too large; return all that was seen."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    length = DeepSpeedSequenceParallelConfig(sp_seq_length=LENGTH, sp_seq_length_is_variable=True)
    accelerator = Accelerator(
        gradient_accumulation_steps=window,
        mixed_precision=precision,
        deepspeed_plugin=DeepSpeedPlugin(config, zero3_init_flag=False),
        parallelism_config=ParallelismConfig(
            sp_size=2, dp_replicate_size=torch.distributed.get_world_size() // 2, sp_handler=length
        ),
    )
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Tokens(), batch_size=2)
    if together:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    else:
        loader = accelerator.prepare(loader)
        assert not isinstance(loader, SequenceParallelLoader)
        model, optimizer = accelerator.prepare(model, optimizer)
        loader = accelerator.deepspeed_ulysses_dl_adapter(loader, model)
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, model) is loader
    seen: dict[str, Any] = {"losses": [], "norms": [], "ends": [], "tokens": [], "length": len(loader)}
    for batch in loader:
        seen["tokens"].append(batch["input_ids"])
        seen["ends"].append(accelerator.gradient_state.end_of_dataloader)
        with accelerator.accumulate(model):
            seen["losses"].append(LOSSES[kind](accelerator, model, batch))
            norm = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
            seen["norms"] += [float(norm)] if accelerator.sync_gradients else []  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
    named = dict(accelerator.unwrap_model(model).named_parameters())
    with GatheredParameters(list(named.values())):
        seen["weights"] = {name: item.detach().clone() for name, item in named.items()}
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not attention
    accelerator.end_training()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attention
    return seen


def alone(size: int, kind: str, window: int) -> dict[str, Any]:
    """The same in one process: groups of two work on the batches of their members in turns."""
    batches = list(DataLoader(Tokens(), batch_size=2))
    turns = [
        batches[start + turn : start + size : 2]
        for start in range(0, len(batches), size)
        for turn in range(2)
    ]
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, Any] = {"losses": [], "norms": [], "weights": dict(model.named_parameters())}
    for first in range(0, len(turns), window):
        found = []
        for turn in turns[first : first + window]:
            pairs = [summed(model, item, F.pad(item["labels"], (0, 1), value=-100)[:, 1:]) for item in turn]
            seen["losses"].append((sum(loss for loss, _ in pairs) / sum(count for _, count in pairs)).item())
            found += pairs
        if kind == "weight":
            total = sum(loss for loss, _ in found) / sum(count for _, count in found)
        else:
            total = sum(loss / count for loss, count in found) / len(found)
        total.backward()
        seen["norms"].append(float(torch.nn.utils.get_total_norm([x.grad for x in model.parameters()])))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def zero(stage: int, **options: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **options}}


@pytest.mark.parametrize(
    ("config", "kind", "window", "together"),
    [
        (zero(0), "weight", 1, True),
        (zero(0), "gather", 2, True),
        (zero(1), "gather", 2, True),
        (zero(2), "weight", 2, True),
        (zero(2), "gather", 1, True),
        (zero(3), "gather", 1, False),
        (zero(3, reduce_scatter=False), "weight", 2, True),
    ],
)
def test_processes_that_share_sequences_train_as_one(world, config, kind, window, together):
    expected = alone(2, kind, window)

    for seen in world.run(with_sequences_shared, config, kind, window, together, timeout_s=100):
        assert (seen["length"], seen["tokens"][0].shape[1]) == (COUNT // 2, LENGTH // 2)
        assert seen["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert seen["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert seen["ends"] == [False] * 7 + [True]
        torch.testing.assert_close(seen["weights"], expected["weights"], rtol=0, atol=1e-6)


def test_processes_that_share_sequences_find_the_norm_of_gradients_in_fp32_next_to_bf16(world):
    config = zero(1) | {"data_types": {"grad_accum_dtype": "fp32"}}
    expected = alone(2, "weight", 1)["norms"]

    for seen in world.run(with_sequences_shared, config, "weight", 1, precision="bf16", timeout_s=100):
        assert seen["norms"] == pytest.approx(expected, rel=2e-2)


def test_groups_that_share_sequences_read_different_ones(world):
    expected = alone(4, "weight", 1)

    ranks = world.run(with_sequences_shared, zero(2), "weight", 1, size=4, timeout_s=100)

    for seen in ranks:
        assert seen["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        torch.testing.assert_close(seen["weights"], expected["weights"], rtol=0, atol=1e-6)
    groups = [
        torch.cat([torch.cat(parts, dim=1) for parts in zip(*pair, strict=True)])
        for pair in ([seen["tokens"] for seen in ranks[:2]], [seen["tokens"] for seen in ranks[2:]])
    ]
    order = [index + shift for index in (0, 8) for shift in range(4)]  # four batches of 2 at a time
    own = torch.stack([Tokens()[index]["input_ids"] for index in order])
    others = torch.stack([Tokens()[index + 4]["input_ids"] for index in order])
    assert torch.equal(groups[0], own)
    assert torch.equal(groups[1], others)


SKIPS = [(), (3,), (1, 2), (4,), (16,), (1, 1, 1, 1, 1)]


def skipping() -> list[list[tuple[list[int], bool]]]:
    """What this process gets of the batches of a group of two, and whether the epoch ends with each."""
    length = DeepSpeedSequenceParallelConfig(sp_seq_length=LENGTH, sp_seq_length_is_variable=True)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(config_of(0), zero3_init_flag=False),
        parallelism_config=ParallelismConfig(sp_size=2, sp_handler=length),
    )
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = accelerator.prepare(model, optimizer, DataLoader(Tokens(), batch_size=1))
    assert accelerator.prepare(loader) is loader  # a warning would be an error here
    found, state = [], accelerator.gradient_state
    for skips in SKIPS:
        rest = loader
        for skip in skips:
            rest = accelerator.skip_first_batches(rest, skip)
        assert isinstance(rest, SequenceParallelLoader)
        found.append([(batch["input_ids"].view(-1).tolist(), state.end_of_dataloader) for batch in rest])
        assert len(rest) == len(found[-1])
    return found


def test_batches_that_are_skipped_are_those_of_the_group(world):
    for whole, *skipped in world.run(skipping, timeout_s=100):
        assert [len(part) for part, _ in whole] == [LENGTH // 2] * 16
        assert [ends for _, ends in whole] == [False] * 15 + [True]
        assert skipped == [whole[sum(skips) :] for skips in SKIPS[1:]]


def without_groups() -> list[str]:
    said = []
    for options, kind in (
        ({}, ValueError),
        ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=1)}, None),
    ):
        config = ParallelismConfig(sp_size=2)
        if kind is not None:
            with pytest.raises(kind) as error:
                Accelerator(parallelism_config=config, **options)
            said.append(str(error.value))
            continue
        accelerator = Accelerator(parallelism_config=config, **options)
        model = torch.nn.Linear(2, 2)
        with pytest.raises(ValueError, match="is for models of transformers") as error:
            accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        said.append(str(error.value))
    with pytest.raises(ValueError, match="tp_size=2"):
        Accelerator(
            parallelism_config=ParallelismConfig(tp_size=2), deepspeed_plugin=DeepSpeedPlugin(zero_stage=1)
        )
    return said


def test_sequence_parallelism_is_rejected_where_it_cannot_be(world):
    said = world.run(without_groups, timeout_s=100)[0]

    assert "Pass a DeepSpeedPlugin too" in said[0]
    assert "Linear has no config" in said[1]
