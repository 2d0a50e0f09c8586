from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from accel_ops.collectives import pack
from accel_ops.collectives.operations import broadcast, copy_tensor_to_devices, gather, reduce
from accel_ops.collectives.pack import SMALL_BYTES
from accel_ops.collectives.pack_sections import as_bytes
from accel_ops.collectives.padding import pad_across_processes
from accel_ops.trees.walk import flatten, recursively_apply
from accel_state.process.info import ProcessInfo
from accel_state.process.state import PartialState, current_process
from accel_world.fake import fake_world

Pair = namedtuple("Pair", "x y")
Leaf = namedtuple("Leaf", "dtype shape layout seed")  # describes a tensor; each rank makes its own

EXACT = ["uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"]
ORDERED = [name for name in EXACT if name != "complex64"]
ALL = [*EXACT, "bool", "int16", "uint16", "uint32", "uint64", "float8_e5m2", "complex32", "complex128"]
LAYOUTS = ["plain", "transposed", "strided", "expanded", "conjugate", "negative", "grad", "offset"]

pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")]


# What the workers run


def make(leaf: Leaf, rank: int, exact: bool) -> torch.Tensor:
    """Make the tensor that `leaf` describes, different on each rank: of random bits, or of small numbers."""
    dtype = getattr(torch, leaf.dtype)
    shape = list(leaf.shape)
    if leaf.layout == "transposed":
        shape.reverse()
    if leaf.layout in ("strided", "offset") and shape:
        shape[0] = shape[0] * 2 + 1
    if leaf.layout == "expanded" and shape:
        shape[0] = min(shape[0], 1)
    random = torch.Generator().manual_seed(leaf.seed * 10 + rank)
    numel = torch.Size(shape).numel()
    if exact:
        tensor = torch.randint(0, 9, shape, generator=random).to(dtype)
    elif leaf.dtype == "bool":
        tensor = torch.randint(0, 2, shape, generator=random).bool()
    else:
        bits = torch.randint(0, 256, (numel * dtype.itemsize,), generator=random, dtype=torch.uint8)
        tensor = bits.view(dtype).reshape(shape)
    return arrange(tensor, leaf)


def arrange(tensor: torch.Tensor, leaf: Leaf) -> torch.Tensor:
    if leaf.layout == "transposed":
        return tensor.permute(tuple(reversed(range(tensor.dim()))))
    if leaf.layout == "strided" and leaf.shape:
        return tensor[1::2]
    if leaf.layout == "offset" and leaf.shape:
        return tensor[1 : 1 + leaf.shape[0]]
    if leaf.layout == "expanded" and leaf.shape:
        return tensor.expand(leaf.shape)
    if leaf.layout == "conjugate" and tensor.is_complex():
        return tensor.conj()
    if leaf.layout == "negative" and tensor.dtype in (torch.float32, torch.float64):
        return torch._neg_view(tensor)
    if leaf.layout == "grad" and (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.requires_grad_()
    return tensor


def build(trees: list[Any], exact: bool) -> list[Any]:
    rank = dist.get_rank()
    return recursively_apply(make, trees, rank, exact, test_type=is_leaf)


def own(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def naive_gather(leaf: torch.Tensor) -> torch.Tensor:
    leaf = torch.atleast_1d(own(leaf))
    gathered = [torch.empty_like(leaf) for _ in range(dist.get_world_size())]
    try:
        dist.all_gather(gathered, leaf)
    except RuntimeError:  # gloo has no such dtype
        dist.all_gather([as_bytes(item) for item in gathered], as_bytes(leaf))
    return torch.cat(gathered)


def naive_reduce(leaf: torch.Tensor, reduction: str, scale: float) -> torch.Tensor:
    if leaf.dtype is torch.bool:
        total = naive_gather(leaf[None]).any(0)
        return total if scale == 1 else total * scale
    total = own(leaf)
    dist.all_reduce(total, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM)
    if reduction == "mean":
        total = total / dist.get_world_size()
    return total if scale == 1 else total * scale


def naive_broadcast(leaf: torch.Tensor, source: int) -> torch.Tensor:
    values = own(leaf)
    try:
        dist.broadcast(values, source)
    except RuntimeError:
        dist.broadcast(as_bytes(values), source)
    return values


def assert_same(tree: Any, expected: Any) -> None:
    ours, _ = flatten(tree)
    theirs, rebuild = flatten(expected)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(as_bytes(one.detach()), as_bytes(other.detach())), (one, other)
    assert describe(tree) == describe(rebuild(ours))


def describe(tree: Any) -> str:
    return str(recursively_apply(lambda leaf: 0, tree)) + str(type(tree))


def check_gather(trees: list[Any]) -> None:
    for tree in build(trees, exact=False):
        before = recursively_apply(own, tree)
        result = gather(tree)
        assert_same(result, recursively_apply(naive_gather, tree))
        assert_same(tree, before)
        assert not any(leaf.requires_grad or leaf.is_conj() or leaf.is_neg() for leaf in flatten(result)[0])


def check_gather_again(tree: Any, times: int) -> None:
    """Gather trees of one structure with other values: no result may share memory with another one."""
    trees = [recursively_apply(other_values, tree, n, test_type=is_leaf) for n in range(times)]
    trees = build(trees, exact=False)
    results = [gather(tree) for tree in trees]
    for one, result in zip(trees, results, strict=True):
        assert_same(result, recursively_apply(naive_gather, one))
    used = [memory(tree) for tree in trees + results]
    assert len(set().union(*used)) == sum(map(len, used))


def other_values(leaf: Leaf, number: int) -> Leaf:
    return leaf._replace(seed=leaf.seed + 1000 * number)


def is_leaf(node: Any) -> bool:
    return isinstance(node, Leaf)


def memory(tree: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in flatten(tree)[0] if leaf.numel()}


def check_reduce(trees: list[Any], reduction: str, scale: float) -> None:
    for tree in build(trees, exact=True):
        before = recursively_apply(own, tree)
        result = reduce(tree, reduction, scale)
        assert_same(result, recursively_apply(naive_reduce, tree, reduction, scale))
        assert_same(tree, before)
        inputs = {leaf.untyped_storage().data_ptr() for leaf in flatten(tree)[0] if leaf.numel()}
        assert not any(leaf.untyped_storage().data_ptr() in inputs for leaf in flatten(result)[0])


def check_broadcast(trees: list[Any], source: int) -> None:
    for tree in build(trees, exact=False):
        expected = recursively_apply(naive_broadcast, tree, source)
        assert broadcast(tree, source) is tree
        assert_same(tree, expected)


def check_padding(leaf: Leaf, first: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = (1 + rank, *leaf.shape[1:])
    tensor = make(leaf._replace(shape=shape), rank, exact=False)
    padded = pad_across_processes(tensor, pad_first=first)
    rows = tensor.shape[0]
    assert padded.shape == (size, *shape[1:])
    assert_same(padded[-rows:] if first else padded[:rows], own(tensor))
    rest = padded[:-rows] if first else padded[rows:]
    assert_same(rest, torch.zeros(rest.shape, dtype=tensor.dtype))


def check_copy(leaf: Leaf, source: int) -> None:
    tensor = make(leaf, source, exact=False)
    copied = copy_tensor_to_devices(tensor if dist.get_rank() == source else None)
    assert_same(copied, own(tensor))


def rounding() -> Any:
    """Random floating point numbers; two processes leave no choice of order, so bits must agree."""
    random = torch.Generator().manual_seed(dist.get_rank())
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    values = [torch.randn(5, generator=random).to(dtype) for dtype in dtypes]
    values.append(torch.randn(SMALL_BYTES, generator=random))
    return reduce(values, "mean", 0.3), recursively_apply(naive_reduce, values, "mean", 0.3)


class Counted(TorchDispatchMode):
    """Counts the collectives of this process, by whatever functions they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.number += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def count_collectives(tree: Any) -> list[int]:
    found = []
    for operation in (gather, reduce, broadcast):
        with Counted() as counted:
            operation(tree)
        found.append(counted.number)
    return found


def memory_of_large() -> tuple[bool, bool]:
    """Whether the very memory of a large tensor, and of its result, went into the collective."""
    leaf = torch.zeros(SMALL_BYTES)
    seen: list[int] = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    real = getattr(dist, name)

    def spy(output: torch.Tensor, tensor: torch.Tensor, **kwargs: Any) -> Any:
        seen.extend([output.data_ptr(), tensor.data_ptr()])
        return real(output, tensor, **kwargs)

    with mock.patch.object(dist, name, spy):
        result = gather({"a": leaf})["a"]
    return seen[0] == result.data_ptr(), seen[1] == leaf.data_ptr()


def error_of(name: str, tree: Any, *args: Any) -> str:
    operation = {"gather": gather, "reduce": reduce, "broadcast": broadcast}[name]
    with pytest.raises(Exception) as caught:
        operation(tree() if callable(tree) else tree, *args)
    return f"{type(caught.value).__name__}: {caught.value}"


def odd(kind: str) -> Any:
    return {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "csr": lambda: torch.eye(3).to_sparse_csr(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "dtensor": dtensor,
        "meta": lambda: torch.ones(3, device="meta"),
        "bool": lambda: torch.ones(3, dtype=torch.bool),
        "text": lambda: "text",
        "int16": lambda: torch.ones(3, dtype=torch.int16),
    }[kind]()


def dtensor() -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)


def error_of_odd(name: str, kind: str) -> str:
    return error_of(name, {"a": torch.ones(1), "b": [odd(kind)]})


def after_destroying() -> list[str]:
    process = current_process()
    dist.barrier()  # who leaves while others still connect takes their connections along
    dist.destroy_process_group()
    errors = []
    for operation in (gather, reduce, broadcast):
        with pytest.raises(RuntimeError) as caught:
            operation(torch.ones(1), process=process)
        errors.append(str(caught.value))
    return errors


class Looking(dict[str, Any]):
    """A dict that keeps what its values were when they were set."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value.clone() if isinstance(value, torch.Tensor) else value)

    def __copy__(self) -> Looking:
        return Looking(self)


def of_a_container_that_looks() -> list[list[float]]:
    tree = Looking({name: torch.full((3,), float(dist.get_rank())) for name in "abc"})
    for _ in range(3):  # memory that is used again holds other values
        gather([torch.full((3,), 9.0)] * 3)
        result = gather(tree)
    assert type(result) is Looking
    return [value.tolist() for value in result.values()]


def of_one_whose_processes_differ_in_gradients() -> list[list[float]]:
    rank = dist.get_rank()
    values = [torch.full((2,), float(rank), requires_grad=rank == 1 and place == 1) for place in range(3)]
    return [value.tolist() for value in gather(values)]


def of_losses() -> tuple[list[list[float]], bool]:
    rank = float(dist.get_rank())
    losses = [torch.tensor(rank), torch.tensor(rank, requires_grad=True) + 1]
    results = [gather(losses), gather(losses[::-1])[::-1]]
    assert_same(results[0], results[1])
    requires_grad = any(value.requires_grad for result in results for value in result)
    return [value.tolist() for value in results[0]], requires_grad


def copy_from(givers: list[int], dtype: str = "float32") -> torch.Tensor:
    rank = dist.get_rank()
    tensor = torch.arange(6).view(2, 3).to(getattr(torch, dtype)).t().requires_grad_(dtype == "float32")
    return copy_tensor_to_devices(tensor if rank in givers else None)


def copy_error(givers: list[int], value: Any = None) -> str:
    tensor = torch.ones(1) if value is None else value
    with pytest.raises(ValueError) as caught:
        copy_tensor_to_devices(tensor if dist.get_rank() in givers else None)
    return str(caught.value)


def with_state() -> tuple[list[float], int]:
    state = PartialState()
    return gather(torch.tensor([float(state.process_index)])).tolist(), state.num_processes


def parameters_in_place() -> tuple[list[float], bool]:
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, dist.get_rank() + 1.0)
    torch.nn.init.constant_(model.bias, dist.get_rank() + 1.0)
    large = torch.nn.Parameter(torch.full((SMALL_BYTES,), dist.get_rank() + 1.0))
    strided = torch.full((SMALL_BYTES, 2), dist.get_rank() + 1.0).t()
    inputs = [*model.parameters(), large, strided]
    outputs = broadcast(inputs, from_process=1)
    values = [value for tensor in outputs for value in tensor.unique().tolist()]
    return values, all(one is other for one, other in zip(inputs, outputs, strict=True))


def in_inference_mode() -> None:
    """Also what is remembered from there must serve outside of it."""
    rank = dist.get_rank()
    tree = {"a": torch.full((2,), float(rank)), "b": torch.full((3, 2), rank), "c": torch.zeros(SMALL_BYTES)}
    for _ in range(2):
        with torch.inference_mode():
            inside = [operation(tree) for operation in (gather, reduce)]
        outside = [operation(tree) for operation in (gather, reduce)]
        assert_same(inside, outside)
        weight = torch.ones(1, requires_grad=True)
        (outside[0]["b"] * weight).sum().backward()


def in_several_packs(limit: int) -> None:
    pack._plan.cache_clear()
    with mock.patch.object(pack, "BUFFER_BYTES", limit), Counted() as counted:
        rank = dist.get_rank()
        tree = [torch.full((n,), float(rank)) for n in range(1, 9)]
        result = gather(tree)
    pack._plan.cache_clear()
    assert counted.number > 2
    assert [leaf.tolist() for leaf in result] == [[0.0] * n + [1.0] * n for n in range(1, 9)]


# Properties


def leaves(dtypes: list[str]) -> st.SearchStrategy[Leaf]:
    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    return st.builds(Leaf, st.sampled_from(dtypes), shapes, st.sampled_from(LAYOUTS), st.integers(0, 99))


def forests(dtypes: list[str]) -> st.SearchStrategy[list[Any]]:
    tree = st.recursive(
        leaves(dtypes),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from("abcdef"), inner, max_size=4)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(UserDict)
            | st.tuples(inner, inner).map(lambda pair: Pair(*pair))
        ),
        max_leaves=10,
    )
    return st.lists(tree, min_size=1, max_size=4)


quick = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(trees=forests(ALL), size=st.sampled_from([2, 3]))
def test_gather_equals_gathering_leaf_by_leaf(world: Any, trees: list[Any], size: int) -> None:
    world.run(check_gather, trees, size=size)


def flat_trees() -> st.SearchStrategy[list[Leaf]]:
    """Lists of leaves that are all of one kind, as most trees are."""
    kind = st.tuples(st.sampled_from(ALL), st.lists(st.integers(0, 4), max_size=3).map(tuple))
    return st.builds(
        lambda kind, n: [Leaf(*kind, "plain", seed) for seed in range(n)], kind, st.integers(1, 20)
    )


@quick
@given(tree=forests(ALL) | flat_trees(), times=st.integers(2, 4), size=st.sampled_from([2, 3]))
def test_each_gather_of_a_repeated_structure_has_results_of_its_own(
    world: Any, tree: Any, times: int, size: int
) -> None:
    world.run(check_gather_again, tree, times, size=size)


@quick
@given(
    given=st.one_of(
        st.tuples(forests(EXACT), st.sampled_from(["mean", "sum"])),
        st.tuples(forests([*ORDERED, "bool"]), st.just("max")),
    ),
    size=st.sampled_from([2, 3]),
    scale=st.sampled_from([1.0, 2, 0.5]),
)
def test_reduce_equals_reducing_leaf_by_leaf(
    world: Any, given: tuple[list[Any], str], size: int, scale: float
) -> None:
    trees, reduction = given
    world.run(check_reduce, trees, reduction, scale, size=size)


@quick
@given(data=st.data(), trees=forests(ALL), size=st.sampled_from([2, 3]))
def test_broadcast_equals_broadcasting_leaf_by_leaf(
    world: Any, data: Any, trees: list[Any], size: int
) -> None:
    world.run(check_broadcast, trees, data.draw(st.integers(0, size - 1)), size=size)


@quick
@given(leaf=leaves(ALL), first=st.booleans(), size=st.sampled_from([2, 3]))
def test_every_tensor_is_padded(world: Any, leaf: Leaf, first: bool, size: int) -> None:
    world.run(check_padding, leaf, first, size=size)


@quick
@given(leaf=leaves(ALL), source=st.integers(0, 1))
def test_every_tensor_is_copied_to_the_others(world: Any, leaf: Leaf, source: int) -> None:
    world.run(check_copy, leaf, source)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "complex64", "bool"])
def test_large_tensors_travel_like_small_ones(world: Any, layout: str, dtype: str) -> None:
    tree = {"large": Leaf(dtype, (300, 500), layout, 1), "small": Leaf(dtype, (3,), layout, 2)}
    world.run(check_gather, [tree])
    world.run(check_broadcast, [tree], 1)
    if dtype != "bool":
        world.run(check_reduce, [tree], "mean", 1.0)
    if dtype != "complex64":
        world.run(check_reduce, [tree], "max", 1.0)


def test_reduce_rounds_as_torch_does(world: Any) -> None:
    for ours, theirs in world.run(rounding):
        assert_same(ours, theirs)


# Cost


def test_a_tree_of_small_tensors_takes_one_collective(world: Any) -> None:
    alike = {f"key{i}": torch.zeros(16) for i in range(64)}
    mixed = [
        torch.zeros(3),
        torch.zeros(2, dtype=torch.int64),
        {"a": torch.tensor(1.0), "b": torch.zeros(0, 2)},
    ]

    assert world.run(count_collectives, alike) == [[1, 1, 1]] * 2
    assert world.run(count_collectives, mixed) == [[1, 2, 1]] * 2  # sums are taken by dtype
    assert world.run(count_collectives, {"a": torch.zeros(0), "b": []}) == [[0, 1, 0]] * 2


def test_large_tensors_travel_alone_and_are_not_copied(world: Any) -> None:
    tree = [torch.zeros(SMALL_BYTES // 4), torch.zeros(SMALL_BYTES // 4 + 1), torch.zeros(2)]

    assert world.run(count_collectives, tree) == [[2, 2, 2]] * 2
    assert world.run(memory_of_large) == [(True, True)] * 2


def test_inference_mode_leaves_nothing_behind(world: Any) -> None:
    world.run(in_inference_mode)


def test_packs_are_bounded(world: Any) -> None:
    world.run(in_several_packs, 64)


# One process, and the process that is given


def alone() -> ProcessInfo:
    process = current_process()
    assert process.world_size == 1
    return process


def test_one_process_gathers_what_it_has() -> None:
    data = {"a": torch.ones(2, requires_grad=True), "b": torch.tensor(3)}

    result = gather(data, process=alone())

    assert result["a"].data_ptr() == data["a"].data_ptr()
    assert not result["a"].requires_grad
    assert result["b"].tolist() == [3]


@pytest.mark.parametrize(
    ("reduction", "scale", "expected", "dtype"),
    [
        ("sum", 1.0, [3, 4], torch.int64),
        ("mean", 1.0, [3, 4], torch.float32),
        ("sum", 2, [6, 8], torch.int64),
        ("sum", 0.5, [1.5, 2], torch.float32),
        ("max", 1.0, [3, 4], torch.int64),
        ("max", 0.5, [1.5, 2], torch.float32),
        ("none", 5.0, [3, 4], torch.int64),
    ],
)
def test_one_process_reduces_as_several_do(
    reduction: str, scale: float, expected: list[float], dtype: torch.dtype
) -> None:
    data = torch.tensor([3, 4])

    result = reduce(data, reduction, scale)

    assert result.tolist() == expected
    assert result.dtype == dtype
    assert data.tolist() == [3, 4]
    assert (result.data_ptr() == data.data_ptr()) == (reduction == "none")


def test_one_process_broadcasts_to_itself() -> None:
    data = {"a": torch.ones(2)}

    assert broadcast(data) is data
    assert copy_tensor_to_devices(torch.ones(2)).tolist() == [1, 1]


def test_works_with_partial_state(world: Any) -> None:
    assert world.run(with_state, size=3) == [([0, 1, 2], 3)] * 3
    assert world.run(with_state, init=False) == [([0, 1], 2)] * 2


def test_broadcast_writes_into_parameters_in_place(world: Any) -> None:
    assert world.run(parameters_in_place) == [([2.0] * 4, True)] * 2


@pytest.mark.parametrize("dtype", ["float32", "bool", "complex64", "int16"])
def test_copy_tensor_to_devices(world: Any, dtype: str) -> None:
    for copied in world.run(copy_from, [1], dtype, size=3):
        assert torch.equal(copied, torch.arange(6).view(2, 3).to(getattr(torch, dtype)).t())
        assert not copied.requires_grad


# Bad input


@pytest.mark.parametrize(
    ("givers", "value", "message"),
    [
        ([], None, "but no process gave one"),
        ([0, 2], None, r"process 0 gave a tensor of shape (1,), process 2 gave a tensor of shape (1,)"),
        ([1], "text", "but process 1 gave a str"),
    ],
)
def test_copy_needs_one_giver(world: Any, givers: list[int], value: Any, message: str) -> None:
    errors = world.run(copy_error, givers, value, size=3)

    assert len(errors) == 3
    assert all(message in error for error in errors)


@pytest.mark.parametrize("name", ["gather", "reduce", "broadcast"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sparse", "TypeError: {name} moves dense tensors, but data['b'][0] is a sparse tensor"),
        ("csr", "TypeError: {name} moves dense tensors, but data['b'][0] is a sparse tensor"),
        ("nested", "TypeError: {name} moves dense tensors, but data['b'][0] is a nested tensor"),
        ("quantized", "TypeError: {name} moves dense tensors, but data['b'][0] is a quantized tensor"),
        ("dtensor", "TypeError: {name} moves dense tensors, but data['b'][0] is a DTensor"),
        ("meta", "ValueError: {name}: data['b'][0] is on meta, but the process group (cpu:gloo,cuda:gloo)"),
        ("text", "TypeError: {name} takes nested dicts"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested", "ignore:.*uantiz")
def test_what_cannot_be_moved_is_named(world: Any, name: str, kind: str, message: str) -> None:
    for error in world.run(error_of_odd, name, kind, timeout_s=100):  # DTensor's import takes long
        assert message.format(name=name) in error


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bool", "reduce takes numbers, but data['b'][0] is boolean. Pass its .int()"),
        ("int16", "cannot reduce tensors of torch.int16"),
    ],
)
def test_what_cannot_be_reduced_is_named(world: Any, kind: str, message: str) -> None:
    for error in world.run(error_of_odd, "reduce", kind):
        assert error.startswith("TypeError")
        assert message in error


def largest() -> torch.Tensor:
    rank = dist.get_rank()
    return reduce(torch.tensor([rank, -rank, 7]), "max")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_max_is_the_largest_of_each_element(world: Any, size: int) -> None:
    for result in world.run(largest, size=size):
        assert result.tolist() == [size - 1, 0, 7]


def test_complex_numbers_have_no_largest() -> None:
    with pytest.raises(TypeError, match=r"order, but data\['a'\] is complex. Pass its .abs\(\)"):
        reduce({"a": torch.ones(1, dtype=torch.complex64)}, "max")


def test_unknown_reductions_and_ranks_are_named(world: Any) -> None:
    error = error_of("reduce", torch.ones(1), "min")
    assert error == "ValueError: reduce: reduction='min' is unknown; allowed: mean, sum, max, none."
    assert "from_process=1, but there are 1 process(es)" in error_of("broadcast", torch.ones(1), 1)
    for error in world.run(error_of, "broadcast", torch.ones(1), 2):
        assert "from_process=2, but there are 2 process(es); give a rank from 0 to 1" in error


def test_a_jagged_tensor_is_named() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)

    with pytest.raises(TypeError, match=r"gather moves dense tensors, but data\[0\] is a nested tensor"):
        gather([jagged])


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_sums_of_booleans_are_rejected_by_one_process_too(reduction: str) -> None:
    with pytest.raises(TypeError, match=r"data\['a'\] is boolean. .* reduction='max'"):
        reduce({"a": torch.ones(1, dtype=torch.bool)}, reduction)


def of_booleans() -> list[list[bool]]:
    own = torch.tensor([dist.get_rank() == 1, False, True])
    return [reduce(own, reduction).tolist() for reduction in ("max", "none")]


def test_booleans_are_reduced_to_whether_any_is_true(world: Any) -> None:
    first, second = world.run(of_booleans)
    assert first == [[True, False, True], [False, False, True]]
    assert second == [[True, False, True], [True, False, True]]


def into_shared_memory() -> list[str]:
    """Process 1 has fewer places than values; what fits is written."""
    errors = []
    for values in (torch.ones(2, 3), torch.arange(6.0).view(2, 3)):
        own = torch.zeros(3).expand(2, 3) if dist.get_rank() == 1 else values
        try:
            broadcast([own])
        except ValueError as error:
            errors.append(str(error))
        else:
            assert torch.equal(own, values)
    return errors


def test_values_that_do_not_fit_into_shared_memory_are_rejected(world: Any) -> None:
    none, one = world.run(into_shared_memory)
    assert none == []
    assert len(one) == 1
    assert "(shape (2, 3), strides (0, 1)) share memory" in one[0]


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("name", ["gather", "reduce", "broadcast"])
def test_a_group_that_moves_nothing_on_the_cpu_is_named(name: str, number: int) -> None:
    with fake_world(0, 2, "cuda:fake"):
        error = error_of(name, {"a": torch.ones(number), "b": torch.ones(3)})
    expected = f"{name}: data['a'] is on cpu, but the process group (cuda:fake) moves tensors on cuda only"
    assert expected in error


def test_a_container_that_looks_at_its_values_is_made_of_what_has_come(world: Any) -> None:
    assert world.run(of_a_container_that_looks) == [[[0.0] * 3 + [1.0] * 3] * 3] * 2


def test_processes_may_differ_in_what_needs_gradients(world: Any) -> None:
    assert world.run(of_one_whose_processes_differ_in_gradients) == [[[0.0, 0.0, 1.0, 1.0]] * 3] * 2


def test_losses_with_gradients_next_to_others_are_gathered(world: Any) -> None:
    for result in world.run(of_losses):
        assert result == ([[0.0, 1.0], [1.0, 2.0]], False)


def test_a_destroyed_group_is_named(world: Any) -> None:
    for errors in world.run(after_destroying):
        for name, error in zip(("gather", "reduce", "broadcast"), errors, strict=True):
            assert error.startswith(f"{name}: process ")
            assert "the process group has been destroyed or was never made" in error
