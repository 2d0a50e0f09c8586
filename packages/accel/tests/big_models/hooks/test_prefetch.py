"""Weights that a thread reads while the module before theirs runs."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import disk_offload
from accel.big_models.hooks import prefetch
from accel.big_models.hooks.prefetch import EndOfForward, Prefetcher, read_into_memory
from accel.big_models.hooks.tensors import tied_key
from accel.hooks import AlignDevicesHook, add_hook_to_module
from accel_ckpt.weights.offload import OffloadedWeightsLoader

X = torch.ones(1, 2)
THREAD = "accel-prefetch"


class Store(Mapping[str, torch.Tensor]):
    """Weights by name that notes which thread reads them, and fails or waits as a test asks."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self.reads: list[tuple[str, str]] = []
        self.broken: set[tuple[str, str]] = set()
        self.hold: threading.Event | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        place = (name, threading.current_thread().name)
        self.reads.append(place)
        if self.hold is not None and place[1] == THREAD:
            self.hold.wait(60)
        if place in self.broken:
            raise OSError(f"{name} cannot be read")
        return self.weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


class Chain(nn.Module):
    """Calls layers in the order that is requested."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2), fail_after: int = 9) -> Any:
        for index in order:
            x = self.layers[index](x)
            if index == fail_after:
                raise KeyError("failed")
        return x


@pytest.fixture(autouse=True)
def no_module_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_SMALL_BYTES", 0)


@pytest.fixture
def plain() -> Chain:
    torch.manual_seed(0)
    return Chain().requires_grad_(False)


def fetched(plain: Chain) -> tuple[Chain, Store, Prefetcher]:
    """Offload a copy of a model to a store, with a prefetcher."""
    model, prefetcher = copy.deepcopy(plain), Prefetcher()
    weights = Store({f"{index}": layer.weight for index, layer in enumerate(plain.layers)})
    for index, layer in enumerate(model.layers):
        hook = AlignDevicesHook("cpu", offload=True, weights_map=Named(weights, f"{index}"))
        hook.prefetcher = prefetcher
        add_hook_to_module(layer, hook)
    add_hook_to_module(model, EndOfForward(prefetcher))
    return model, weights, prefetcher


class Named(dict[str, torch.Tensor]):
    """The weight of one layer of a store."""

    def __init__(self, store: Store, name: str) -> None:
        super().__init__(weight=store.weights[name])
        self.store, self.name = store, name

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.store[self.name]


def readers(weights: Store) -> list[tuple[str, str]]:
    found = [(name, "thread" if thread == THREAD else "module") for name, thread in weights.reads]
    weights.reads.clear()
    return sorted(found)


def fetching_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def test_the_first_forward_learns_and_the_next_read_ahead(plain: Chain) -> None:
    model, weights, _ = fetched(plain)
    expected = plain(X)

    assert torch.equal(model(X), expected)
    assert readers(weights) == [("0", "module"), ("1", "module"), ("2", "module")]
    for _ in range(2):
        assert torch.equal(model(X), expected)
        assert readers(weights) == [("0", "module"), ("1", "thread"), ("2", "thread")]


def test_no_thread_reads_when_the_forward_has_ended(plain: Chain) -> None:
    model, weights, _ = fetched(plain)
    model(X)
    weights.hold = threading.Event()
    threading.Timer(0.2, weights.hold.set).start()
    model(X, order=(0,))  # what comes after it is read in vain, and waited for

    assert not fetching_threads()
    assert all(layer.weight.is_meta for layer in model.layers)


def test_no_thread_reads_when_the_forward_has_failed(plain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_BYTES_AHEAD", 1)
    model, weights, _ = fetched(plain)
    model(X)
    readers(weights)
    with pytest.raises(KeyError, match="failed"):
        model(X, fail_after=0)

    assert not fetching_threads()
    assert readers(weights) == [("0", "module"), ("1", "thread")]
    assert torch.equal(model(X), plain(X))


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0), (1,), (0, 0, 1), (0, 1, 0, 2), (2, 2, 2)])
def test_an_order_that_changes_changes_no_result(plain: Chain, order: tuple[int, ...]) -> None:
    model, _, _ = fetched(plain)
    for times in (order, (0, 1, 2), order, order):
        assert torch.equal(model(X, order=times), plain(X, order=times))
    assert all(layer.weight.is_meta for layer in model.layers)


def test_a_new_order_is_learnt(plain: Chain) -> None:
    model, weights, _ = fetched(plain)
    for _ in range(2):
        model(X)
    model(X, order=(2, 1, 0))
    readers(weights)
    model(X, order=(2, 1, 0))

    assert [read for read in readers(weights) if read[1] == "module"] == [("2", "module")]


def test_a_module_reads_for_itself_what_the_thread_could_not(plain: Chain) -> None:
    model, weights, _ = fetched(plain)
    model(X)
    readers(weights)
    weights.broken = {("1", THREAD)}

    assert torch.equal(model(X), plain(X))
    assert ("1", "module") in readers(weights)


def test_an_error_of_reading_reaches_the_caller_once_and_leaves_nothing_behind(plain: Chain) -> None:
    model, weights, _ = fetched(plain)
    model(X)
    weights.broken = {("1", THREAD), ("1", threading.current_thread().name)}
    with pytest.raises(OSError, match="1 cannot be read"):
        model(X)

    assert not fetching_threads()
    assert all(layer.weight.is_meta for layer in model.layers)
    weights.broken = set()
    assert torch.equal(model(X), plain(X))


def test_threads_that_run_one_model_each_have_an_order(plain: Chain) -> None:
    model, _, _ = fetched(plain)
    orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2)]
    wrong: list[Any] = []

    def run(order: tuple[int, ...]) -> None:
        try:
            expected = plain(X, order=order)
            wrong.extend(order for _ in range(20) if not torch.equal(model(X, order=order), expected))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
    assert not fetching_threads()
    assert all(layer.weight.is_meta for layer in model.layers)


def test_each_thread_learns_the_order_of_its_calls(plain: Chain) -> None:
    model, weights, prefetcher = fetched(plain)
    first, second, third = (layer._hf_hook for layer in model.layers)
    prefetcher.begin()
    prefetcher.start_next(first)
    other = threading.Thread(target=lambda: (prefetcher.begin(), prefetcher.start_next(third)))
    other.start()
    other.join()
    prefetcher.start_next(second)
    prefetcher.finish()
    readers(weights)
    prefetcher.begin()
    prefetcher.start_next(first)
    prefetcher.finish()

    assert readers(weights) == [("1", "thread")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_a_thread_of_its_parent(plain: Chain) -> None:
    model, weights, prefetcher = fetched(plain)
    expected = plain(X)
    model(X)
    weights.hold = threading.Event()
    prefetcher.begin()
    prefetcher.start_next(model.layers[0]._hf_hook)  # reads for layer 1, and does not end
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            weights.hold = None
            same = all(torch.equal(model(X), expected) for _ in range(2))
        except BaseException:
            same = False
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    weights.hold.set()
    prefetcher.finish()

    assert os.waitstatus_to_exitcode(status) == 0


def test_copies_learn_for_themselves(plain: Chain) -> None:
    model, _, prefetcher = fetched(plain)
    model(X)

    for other in (copy.deepcopy(prefetcher), pickle.loads(pickle.dumps(prefetcher))):
        assert vars(other)["_next"] == {}
        assert other.take(model.layers[0]._hf_hook) == {}


def test_a_module_that_is_deleted_is_read_no_more(plain: Chain) -> None:
    model, weights, _ = fetched(plain)
    model(X)
    del model.layers[2]
    readers(weights)
    model(X, order=(0, 1))

    assert readers(weights) == [("0", "module"), ("1", "thread")]


def test_a_tied_weight_that_is_there_is_not_read() -> None:
    layer = nn.Linear(2, 2, bias=False)
    weights = Store({"weight": layer.weight.detach().clone()})
    ties: Any = {tied_key(layer.weight): {}}
    hook = AlignDevicesHook("cpu", offload=True, weights_map=weights, tied_params_map=ties)
    add_hook_to_module(layer, hook)

    assert list(hook.fetch()) == ["weight"]
    next(iter(ties.values()))[torch.device("cpu")] = weights.weights["weight"]
    assert hook.fetch() == {}


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3),
        torch.ones(4, 4).t(),
        torch.empty(0),
        torch.ones(2, device="meta"),
        torch.ones((), dtype=torch.bfloat16),
        nn.Parameter(torch.ones(2)),
    ],
    ids=["plain", "a view", "empty", "meta", "a scalar", "a parameter"],
)
def test_any_weight_is_brought_in_as_it_is(value: torch.Tensor) -> None:
    assert read_into_memory(value) is value


Reads = list[tuple[str, int]]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """The name of each weight that is read, with the thread that reads it."""
    found: Reads = []
    get = OffloadedWeightsLoader.__getitem__

    def record(loader: OffloadedWeightsLoader, name: str) -> torch.Tensor:
        found.append((name, threading.get_ident()))
        return get(loader, name)

    monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", record)
    return found


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(count)))


def test_one_thread_reads_many_small_modules(reads: Reads, tmp_path: Path) -> None:
    model = disk_offload(layers(20), tmp_path, execution_device="cpu")
    expected = model(torch.ones(1, 32))
    reads.clear()
    assert torch.equal(model(torch.ones(1, 32)), expected)

    assert [name for name, _ in reads] == [f"{index}.weight" for index in range(20)]
    (first, *others) = [thread for _, thread in reads]
    assert first == threading.get_ident()
    assert len(set(others)) == 1
    assert others[0] != first
    assert not [thread for thread in threading.enumerate() if thread.name == "accel-prefetch"]


def test_large_modules_are_read_one_ahead(
    reads: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_BYTES_AHEAD", 32 * 32 * 4)
    model = disk_offload(layers(6), tmp_path, execution_device="cpu")
    seen: list[int] = []
    for layer in model:
        layer.register_forward_hook(lambda *_: seen.append(_count(reads)))
    model(torch.ones(1, 32))
    reads.clear()
    seen.clear()
    model(torch.ones(1, 32))

    assert seen == [2, 3, 4, 5, 6, 6]


def test_a_small_module_does_not_keep_the_large_one_after_it_from_being_read(
    reads: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_BYTES_AHEAD", 32 * 32 * 4)
    model = nn.Sequential(*(module for _ in range(3) for module in (nn.Linear(32, 32), nn.LayerNorm(32))))
    disk_offload(model, tmp_path, execution_device="cpu")
    model(torch.ones(1, 32))
    reads.clear()
    seen: list[int] = []
    model[0].register_forward_hook(lambda *_: seen.append(_count(reads)))
    model(torch.ones(1, 32))

    assert seen == [6]
    assert {name.partition(".")[0] for name, _ in reads[:6]} == {"0", "1", "2"}


def test_small_modules_read_for_themselves_and_the_large_one_after_them_is_read_ahead(
    reads: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_SMALL_BYTES", 1000)
    model = nn.Sequential(*(module for _ in range(3) for module in (nn.Linear(32, 32), nn.LayerNorm(32))))
    disk_offload(model, tmp_path, execution_device="cpu")
    for _ in range(2):
        reads.clear()
        model(torch.ones(1, 32))

    by_thread = {name for name, thread in reads if thread != threading.get_ident()}
    assert by_thread == {"2.weight", "2.bias", "4.weight", "4.bias"}


def test_a_model_of_small_modules_starts_no_thread(
    reads: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_SMALL_BYTES", 1 << 16)
    model = disk_offload(layers(30), tmp_path, execution_device="cpu")
    for _ in range(2):
        model(torch.ones(1, 32))

    assert {thread for _, thread in reads} == {threading.get_ident()}


def _count(reads: Reads) -> int:
    """Count reads, those of a thread that is reading included."""
    for thread in threading.enumerate():
        if thread.name == "accel-prefetch":
            thread.join()
    return len(reads)


class Parts(nn.Module):
    """A model that is never called as a whole."""

    def __init__(self, plain: Chain) -> None:
        super().__init__()
        self.encoder, self.decoder = copy.deepcopy(plain), copy.deepcopy(plain)


def test_a_part_that_is_called_alone_reads_ahead_and_keeps_nothing(
    plain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, fetches = AlignDevicesHook.fetch, []
    monkeypatch.setattr(AlignDevicesHook, "fetch", lambda self: fetches.append(self) or fetch(self))
    model = disk_offload(Parts(plain), tmp_path, "cpu")
    prefetcher = model.encoder.layers[0]._hf_hook.prefetcher

    for _ in range(3):
        for part in (model.encoder, model.decoder):
            assert torch.equal(part(X), plain(X))
            assert prefetcher._reads == {}
            assert not fetching_threads()

    assert len(fetches) == 2 * 2 * 2  # all but the first layer of each part, from the second time on


def test_layers_that_are_called_one_by_one_keep_nothing(plain: Chain, tmp_path: Path) -> None:
    model = disk_offload(copy.deepcopy(plain), tmp_path, "cpu")
    prefetcher = model.layers[0]._hf_hook.prefetcher
    model(X)
    for _ in range(2):
        for layer, same in zip(model.layers, plain.layers, strict=True):
            assert torch.equal(layer(X), same(X))
            assert prefetcher._reads == {}
            assert not fetching_threads()
