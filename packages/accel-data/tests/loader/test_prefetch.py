from collections import UserDict
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_data import prepare_data_loader
from accel_data.loader.iteration import split_items
from accel_data.loader.prefetch import Copy, SideStream, copy_ahead
from accel_data.order.layout import EpochInfo
from accel_state.devices.table import DEVICES
from accel_world.devices import needs_cuda

pytestmark = pytest.mark.usefixtures("fresh_state")

CUDA = torch.device("cuda", 0)


class Counted(Dataset):
    """Rows of one number; counts how many have been read."""

    def __init__(self, length=12, act=lambda: None):
        self.length = length
        self.act = act
        self.reads = 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.act()
        self.reads += 1
        return torch.full((3,), index)


class CountedStream(IterableDataset):
    def __init__(self):
        self.reads = 0

    def __iter__(self):
        for index in range(11):
            self.reads += 1
            yield torch.full((3,), index)


def test_on_the_cpu_nothing_is_read_before_its_turn():
    for shuffle, drop_last, size in product((False, True), (False, True), (2, 5)):
        data = Counted()
        loader = DataLoader(data, size, shuffle, drop_last=drop_last)
        loader = prepare_data_loader(loader, device=torch.device("cpu"), put_on_device=True)
        for number, _ in enumerate(loader, 1):
            assert data.reads == min(number * size, 12)
        assert data.reads == (10 if drop_last and size == 5 else 12)


def test_only_devices_with_streams_copy_ahead():
    assert SideStream.of(torch.device("cpu"), True) is None
    assert SideStream.of("meta", True) is None  # no device of the table
    assert {kind for kind, entry in DEVICES.items() if entry.streams} == {
        "npu",
        "mlu",
        "sdaa",
        "musa",
        "cuda",
        "xpu",
    }


class Noted:
    """Stands for the side stream: says what it is asked to do, and in which order."""

    def __init__(self):
        self.log = []

    def start(self, batch, step_rows):
        self.log.append(f"start {batch}")
        return Copy(batch, None, step_rows)

    def finish(self, copy):
        self.log.append(f"finish {copy.batch}")
        return copy.batch


def follow(batches, side, info=None):
    for batch in copy_ahead(batches, info or EpochInfo(), side):
        side.log.append(f"use {batch}")
    return side.log


def test_a_batch_is_copied_while_the_one_before_is_used():
    assert follow(iter("abc"), Noted()) == [
        *("start a", "finish a", "start b", "use a"),
        *("finish b", "start c", "use b", "finish c", "use c"),
    ]
    assert follow(iter(()), Noted()) == []


def drawing(letters):
    for letter in letters:
        torch.rand(1)
        yield letter


def test_reading_that_draws_stays_in_turn():
    turns = [f"{turn} {letter}" for letter in "abc" for turn in ("start", "finish", "use")]

    assert follow(drawing("abc"), Noted()) == turns


def failing():
    yield from "ab"
    raise OSError("disk is gone")


def test_an_error_comes_when_it_is_its_turn():
    side = Noted()
    with pytest.raises(OSError, match="disk is gone"):
        follow(failing(), side)
    assert side.log[-1] == "use b"


def test_what_is_known_of_a_batch_stays_with_it():
    items = [("a", None, False), ("b", (2, 1), False), ("c", None, False), ("d", (1, 0), True)]
    batches, info = split_items(item for item in items)
    seen = [(batch, info.current_rows) for batch in copy_ahead(batches, info, Noted())]

    assert seen == [(batch, step_rows) for batch, step_rows, _ in items]
    assert (info.num_batches, info.last_rows) == (4, (1, 0))


@dataclass
class Example:
    ids: torch.Tensor
    text: str


class Hidden:
    """Has a tensor that cannot be seen from outside, and moves it itself."""

    def __init__(self, tensor):
        self._tensor = tensor

    def to(self, device):
        return Hidden(self._tensor.to(device))

    def get(self):
        return self._tensor


KINDS = {
    "tensor": lambda n: torch.full((64, 1000), float(n)),
    "dict": lambda n: {"x": torch.full((64, 1000), n), "text": ["a", None], 3: (torch.tensor(n),)},
    "dataclass": lambda n: Example(torch.full((64, 1000), n), "text"),
    "mapping": lambda n: UserDict(x=torch.full((64,), n)),
    "packed": lambda n: pack_sequence([torch.full((5,), float(n)), torch.full((3,), float(n))]),
    "sparse": lambda n: torch.full((4, 4), float(n)).to_sparse(),
    "hidden": lambda n: Hidden(torch.full((64,), n)),
    "there": lambda n: torch.full((64,), n, device=CUDA),
    "pinned": lambda n: torch.full((64, 1000), n).pin_memory(),
}


def values(batch):
    """Return the tensors in a batch, all on the device."""
    if isinstance(batch, torch.Tensor):
        return [batch.to_dense()]
    if isinstance(batch, PackedSequence):
        return [batch.data]
    if isinstance(batch, Hidden):
        return [batch.get()]
    if isinstance(batch, Example):
        return [batch.ids]
    return [batch["x"], *batch.get(3, ())]


class Made(Dataset):
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return KINDS[self.kind](index)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_batches_are_whole_and_stay_so(kind, non_blocking):
    loader = prepare_data_loader(
        DataLoader(Made(kind), batch_size=None), CUDA, put_on_device=True, non_blocking=non_blocking
    )
    sums = []
    for number, batch in enumerate(loader):
        busy = torch.randn(2000, 2000, device=CUDA)
        for _ in range(3):
            busy = busy @ busy * 1e-3  # so that what follows is late on the device
        for tensor in values(batch):
            assert tensor.device == CUDA
            sums.append((tensor.double().mean(), number))
        del batch, tensor, busy  # its memory may be used again at once: not before it has been read
    torch.cuda.synchronize()

    assert all(mean.item() == number for mean, number in sums)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("stream", [False, True])
def test_cuda_one_batch_is_read_ahead(stream):
    data = CountedStream() if stream else Counted()
    loader = prepare_data_loader(DataLoader(data, 2), CUDA, put_on_device=True, dispatch_batches=False)
    lasts = []
    for number, batch in enumerate(loader, 1):
        assert batch.device == CUDA
        assert batch[:, 0].tolist() == list(range(11 if stream else 12))[2 * number - 2 : 2 * number]
        assert data.reads == min(2 * (number + 1 + stream), data.length if not stream else 11)
        assert loader.state_dict()["consumed"] == 2 * number
        lasts.append(loader.end_of_dataloader)

    assert lasts == [False] * 5 + [True]


@pytest.mark.gpu
@needs_cuda
def test_cuda_copies_run_next_to_the_users_stream():
    side = SideStream.of(CUDA, non_blocking=True)
    torch.cuda._sleep(1_000_000_000)  # the user's stream is busy for a good part of a second
    copy = side.start({"x": torch.ones(1000, 1000)}, None)
    copy.done.synchronize()
    assert not torch.cuda.current_stream().query()  # it still is

    batch = side.finish(copy)
    assert batch["x"].sum().item() == 1e6


@pytest.mark.gpu
@needs_cuda
def test_cuda_memory_for_batches_is_that_of_one_pass():
    data = [torch.zeros(2**20) for _ in range(6)]  # 4 MiB: more than what small tensors share
    loader = prepare_data_loader(DataLoader(data, 2), CUDA, put_on_device=True)
    reserved = []
    for _ in range(5):
        for batch in loader:
            batch.add_(1)
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1:] == [reserved[1]] * 4


@pytest.mark.gpu
@needs_cuda
def test_cuda_reading_that_draws_stays_in_turn():
    data = Counted(act=lambda: torch.rand(1))
    for number, _ in enumerate(prepare_data_loader(DataLoader(data, 2), CUDA, put_on_device=True), 1):
        assert data.reads == 2 * number
