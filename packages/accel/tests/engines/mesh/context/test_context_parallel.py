"""Context parallelism on real gloo workers; that whole runs are equal is in tests-integration."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from accel.accelerator import Accelerator
from accel.engines.context_parallel import balanced_positions
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_data.config import DataLoaderConfiguration
from accel_state.parallelism.config import ParallelismConfig, TorchContextParallelConfig

pytestmark = pytest.mark.usefixtures("fresh_state")


class Attention(torch.nn.Module):
    def __init__(self, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.inputs = torch.nn.Linear(8, 8 + 2 * groups * (8 // heads))
        self.register_buffer("positions", torch.randn(8, 8))

    def forward(self, x: torch.Tensor, is_causal: bool = True, **options: Any) -> torch.Tensor:
        features = 8 // self.heads
        heads = self.inputs(x + self.positions).unflatten(-1, (-1, features)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.groups, self.groups], dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True, **options)


def make(strategy: str = "allgather", **options: Any) -> tuple[Accelerator, Any]:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Attention"],
        **options,
    )
    handler = TorchContextParallelConfig(cp_comm_strategy=strategy)
    config = ParallelismConfig(cp_size=2, cp_handler=handler)
    accelerator = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin)
    torch.manual_seed(0)
    return accelerator, accelerator.prepare(torch.nn.Sequential(Attention()))


def data() -> torch.Tensor:
    return torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))


def buffers() -> None:
    accelerator, model = make()
    mine = balanced_positions(8, accelerator.context_parallel_rank, 2)
    tokens = torch.arange(18).reshape(2, 9)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]  # two views of one storage
    expanded = torch.arange(8).expand(2, 8)
    table = model[0].positions
    before = [item.clone() for item in (tokens, inputs, labels, expanded, table)]
    plain = F.scaled_dot_product_attention

    shared = [inputs, labels, expanded, table, inputs]  # one of them twice
    with accelerator.maybe_context_parallel(shared, [1, -1, 1, 0, 1], {expanded}):
        assert torch.equal(inputs, before[1][:, mine])
        assert torch.equal(labels, before[2][:, mine])
        assert torch.equal(expanded, before[3][:, mine])
        assert torch.equal(table, before[4][mine])
        with torch.no_grad():
            model(data()[:, mine])

    assert torch.equal(expanded, before[3][:, mine])
    for item, old in zip((tokens, inputs, labels, table), (*before[:3], before[4]), strict=True):
        assert torch.equal(item, old)
    assert table is model[0].positions
    assert F.scaled_dot_product_attention is plain


def test_buffers_are_shared_in_place_and_restored(world):
    world.run(buffers)


def gradients(is_causal: bool, checkpointing: bool) -> tuple[float, dict[str, torch.Tensor]]:
    accelerator, model = make(activation_checkpointing=checkpointing)
    x, target = data(), data().roll(1).reshape(2, 8, 4, 2)
    with accelerator.maybe_context_parallel([x, target, model[0].positions], [1, 1, 0]):
        out = model(x) if is_causal else model[0](x, is_causal=False, scale=0.3)
        loss = F.mse_loss(out.transpose(1, 2), target)
        accelerator.backward(loss)
    loss = accelerator.reduce(loss.detach(), "mean")
    return float(loss), {name: item.grad.full_tensor() for name, item in model.named_parameters()}


def rotation(strategy: str) -> str:
    """How torch sends keys and values around."""
    accelerator, model = make(strategy)
    torchs = import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    plain, seen = torchs._templated_ring_attention, []

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append(torchs._cp_options.rotate_method.name)
        return plain(*args, **kwargs)

    x = data()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchs, "_templated_ring_attention", noting)
        with torch.no_grad(), accelerator.maybe_context_parallel([x, model[0].positions], [1, 0]):
            model(x)
    return seen[0]


@pytest.mark.parametrize(("strategy", "name"), [("allgather", "ALL_GATHER"), ("alltoall", "ALL_TO_ALL")])
def test_keys_and_values_travel_as_requested(world, strategy, name):
    assert world.run(rotation, strategy) == [name, name]


@pytest.mark.parametrize(("is_causal", "checkpointing"), [(True, False), (True, True), (False, False)])
def test_gradients_are_those_of_whole_sequences(world, is_causal, checkpointing):
    torch.manual_seed(0)
    model = torch.nn.Sequential(Attention())
    out = model[0](data(), is_causal=is_causal, scale=None if is_causal else 0.3).transpose(1, 2)
    expected = F.mse_loss(out, data().roll(1).reshape(2, 8, 4, 2))
    expected.backward()

    for loss, grads in world.run(gradients, is_causal, checkpointing, timeout_s=100):
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        for name, item in model.named_parameters():
            torch.testing.assert_close(grads[name], item.grad, rtol=1e-5, atol=1e-6)


def in_bfloat16() -> torch.dtype:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="fp32")
    config = ParallelismConfig(cp_size=2)
    accelerator = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin, mixed_precision="bf16")
    model = accelerator.prepare(Attention())
    x = data()
    with accelerator.maybe_context_parallel([x, model.positions], [1, 0]), accelerator.autocast():
        return F.scaled_dot_product_attention(*[x.unflatten(-1, (4, 2)).transpose(1, 2)] * 3).dtype


def test_the_ring_attends_in_the_precision_of_autocast(world):
    assert world.run(in_bfloat16) == [torch.bfloat16] * 2


def refused_buffers() -> list[str]:
    accelerator, _ = make()
    x, short = torch.zeros(2, 8), torch.zeros(2, 4)
    cases: list[tuple[Any, Any, Any]] = [
        (None, None, None),
        ([x], [1, 1], None),
        ([x, short], [1, 1], None),
        ([torch.zeros(2, 10)], [1], None),
        ([x], [2], None),
        ([x], [1], {short}),
        ([torch.nn.Parameter(torch.zeros(8))], [0], None),
    ]
    found = []
    for case in cases:
        with pytest.raises(ValueError, match=r".") as error, accelerator.maybe_context_parallel(*case):
            pytest.fail("the buffers were taken")
        found.append(str(error.value))
    assert x.shape == (2, 8)
    return found


def test_buffers_that_cannot_be_shared_are_rejected_with_the_fix(world):
    none, dims, lengths, pieces, dim, keep, trained = world.run(refused_buffers)[0]

    assert "got 0 buffers and 0 buffer_seq_dims" in none
    assert "got 1 buffers and 2 buffer_seq_dims" in dims
    assert "sequences of 4, 8 tokens" in lengths
    assert "10 tokens do not divide into 2 * cp_size = 4" in pieces
    assert "Pad them to 12 tokens" in pieces
    assert "buffer_seq_dims[0] is 2" in dim
    assert "not among buffers" in keep
    assert "buffers[0] is a tensor that requires grad" in trained


def refused_attention() -> list[str]:
    accelerator, model = make()
    found = []
    for arguments in (
        {"attn_mask": torch.ones(4, 4, dtype=torch.bool), "is_causal": False},
        {"dropout_p": 0.1},
    ):
        x = data()
        with (
            pytest.raises(ValueError, match=r".") as error,
            accelerator.maybe_context_parallel([x, model[0].positions], [1, 0]),
        ):
            model[0](x, **arguments)
        assert x.shape == model[0].positions[None].expand_as(x).shape == (2, 8, 8)
        found.append(str(error.value))
    x = data()
    with pytest.raises(ValueError, match=r".") as error, accelerator.maybe_context_parallel([x], [1]):
        F.scaled_dot_product_attention(x, x, x)
    found.append(str(error.value))
    with pytest.raises(ValueError, match=r".") as error, accelerator.maybe_context_parallel([x], [1]):
        F.scaled_dot_product_attention(x[None], x[None, :, :1], x[None, :, :1], is_causal=True)
    return [*found, str(error.value)]


def test_attention_that_cannot_go_around_is_rejected_with_the_reason(world):
    mask, dropout, shape, cross = world.run(refused_attention)[0]

    assert "attention got a mask (4, 4)" in mask
    assert "is_causal=True" in mask
    assert "dropout_p=0.1" in dropout
    assert "takes plain tensors (batch, heads, tokens, features)" in shape
    assert "4 queries to 1 keys" in cross


def misuse() -> list[str]:
    accelerator, model = make()
    x, table = data(), model[0].positions
    found = []
    with pytest.raises(RuntimeError) as error, accelerator.maybe_context_parallel([x], [1]):
        x.sum()
    found.append(str(error.value))
    with (
        pytest.raises(RuntimeError) as error,
        accelerator.maybe_context_parallel([x], [1]),
        accelerator.maybe_context_parallel([x], [1]),
    ):
        pytest.fail("it was entered twice")
    found.append(str(error.value))
    with accelerator.maybe_context_parallel([x, table], [1, 0], {x}):
        loss = model(x).sum()
    with pytest.raises(RuntimeError) as error:
        accelerator.backward(loss)
    found.append(str(error.value))
    with pytest.raises(RuntimeError, match="after the context was left"):
        loss.backward()
    return found


def test_what_would_be_wrong_in_silence_is_an_error(world):
    unused, twice, late = world.run(misuse)[0]

    assert "no attention used the ring" in unused
    assert "attn_implementation='sdpa'" in unused
    assert "entered inside itself" in twice
    assert "Call accelerator.backward(loss) inside" in late


def group_facts() -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2, cp_size=2))
    model = accelerator.prepare(Attention())
    rows = accelerator.gather_for_metrics(torch.arange(2) + 10 * accelerator.data_parallel_rank).tolist()
    mesh = model.inputs.weight.device_mesh
    return (
        accelerator.engine.name,
        accelerator.engine.data_parallel.rank_and_size,
        rows,
        mesh.mesh_dim_names,
        accelerator.is_fsdp2,
    )


def test_a_group_has_one_batch_and_shards_of_the_parameters(world):
    names = ("dp_replicate", "dp_shard_cp")
    for rank, facts in enumerate(world.run(group_facts, size=4)):
        assert facts == ("fsdp2 x cp", (rank // 2, 2), [0, 1, 10, 11], names, True)


def gathered_parts() -> tuple[list[Any], dict[str, str]]:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    rank = accelerator.process_index
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(6), batch_size=2))
    per_token = torch.tensor([0.0, 1, 2, 3]) + 100 * rank
    parts = {
        "per token": per_token,
        "per token, as many as samples": per_token[:2],
        "constant per token": torch.full((4,), float(rank)),
        "sum": per_token.sum(),
        "count": torch.tensor([3, 3]) + rank,
        "small": torch.tensor([[1e-6, 2e-6]]) * (1 + rank),
        "logits": torch.zeros(2, 3) + rank,
        "texts": ["a", "b"] if rank else ["a", "c"],
        "arrays": per_token.numpy(),
    }
    merged = [
        torch.tensor(rank + 0.5).repeat(2),
        {"same": torch.tensor([[4], [5]]), "nan": torch.tensor([float("nan"), 1.0])},
        ["a", {"b": torch.arange(2).numpy()}],
    ]
    found, refused = [], {}
    for _ in loader:
        found = [accelerator.gather_for_metrics(value) for value in merged]
        for name, value in parts.items():
            with pytest.raises(ValueError, match="differ between") as error:
                accelerator.gather_for_metrics(value)
            refused[name] = str(error.value)
    return found, refused


def test_of_parts_only_what_is_equal_or_a_loss_for_each_sample_is_merged(world):
    """transformers' Trainer evaluates inside the context, and gathers its loss once for each sample."""
    for (loss, tensors, objects), refused in world.run(gathered_parts):
        assert loss.tolist() == [1.0, 1.0]
        assert tensors["same"].tolist() == [[4], [5]]
        assert str(tensors["nan"].tolist()) == "[nan, 1.0]"
        assert objects[0] == "a"
        assert objects[1]["b"].tolist() == [0, 1]
        assert all("accelerator.reduce(x, 'mean')" in message for message in refused.values())


def uneven_losses_of_parts() -> list[float]:
    """Three samples for two groups; the loss of a batch is its first sample, +-0.5 in the two parts."""
    config = ParallelismConfig(cp_size=2, dp_shard_size=2)
    loaders = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, parallelism_config=config, dataloader_config=loaders)
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(3), batch_size=2))
    found: list[float] = []
    for batch in loader:
        loss = batch[0] + accelerator.context_parallel_rank - 0.5
        found += accelerator.gather_for_metrics(loss.repeat(len(batch))).tolist()
    return found


def test_losses_of_shards_are_full_also_where_batches_are_uneven(world):
    assert world.run(uneven_losses_of_parts, size=4) == [[0.0, 0.0, 2.0]] * 4


def test_without_context_parallelism_nothing_happens():
    accelerator = Accelerator(cpu=True)
    x = torch.zeros(2, 7)
    with accelerator.maybe_context_parallel(buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x}):
        assert x.shape == (2, 7)
    with accelerator.maybe_context_parallel():
        pass
