from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_data.dispatch.wire import Packer, Unpacker, check_same_structure

Pair = namedtuple("Pair", "left right")


@dataclass
class Example:
    ids: object
    text: object


def over(packer, unpacker, batch):
    """Take a batch over to the other side; return it and whether its structure went with it."""
    packet = packer.pack(batch)
    unpacker.set_structure(packet.structure)
    content = torch.cat([torch.empty(0, dtype=torch.uint8), *packet.tensors])
    assert packet.nbytes == len(packet.structure) + len(content)
    return unpacker.unpack(content), bool(packet.structure)


def test_the_structure_continuesce():
    packer, unpacker = Packer(), Unpacker()
    sent = []
    for number in range(4):
        batch, structure = over(packer, unpacker, {"x": torch.full((2,), number), "y": "text"})
        sent.append(structure)
        assert batch["x"].tolist() == [number] * 2

    assert sent == [True, False, False, False]
    assert over(packer, unpacker, {"x": torch.ones(3), "y": "text"})[1]  # another shape
    assert over(packer, unpacker, {"x": torch.ones(3), "y": "other"})[1]
    packer.reset()
    assert over(packer, unpacker, {"x": torch.ones(3), "y": "other"})[1]


LEAVES = {"array": lambda: numpy.zeros(2), "sparse": lambda: torch.zeros(2).to_sparse(), "list": lambda: [1]}


@pytest.mark.parametrize("kind", LEAVES)
def test_batches_share_no_memory(kind):
    packer, unpacker = Packer(), Unpacker()
    first, _ = over(packer, unpacker, {"x": torch.zeros(2), "other": LEAVES[kind]()})
    before = repr(first)
    first["x"] += 1
    first["other"] += {"list": [2], "array": 1, "sparse": torch.ones(2).to_sparse()}[kind]
    assert repr(first) != before
    second, _ = over(packer, unpacker, {"x": torch.zeros(2), "other": LEAVES[kind]()})

    assert repr(second) == before


def test_views_and_gradients_arrive_as_values():
    base = torch.arange(12.0).reshape(3, 4).requires_grad_()
    batch = [
        base.T,
        base[:, 1],
        base[0, 0],
        base[:1, 1],
        torch.complex(base, base).conj(),
        torch.nn.Parameter(base[1]),
    ]
    arrived, _ = over(Packer(), Unpacker(), batch)

    for one, other in zip(arrived, batch, strict=True):
        assert torch.equal(one, other)
        assert not one.requires_grad


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=5,
    )
)
def test_tensors_of_all_shapes_and_dtypes_arrive(kinds):
    batch = [torch.randint(0, 2, shape).to(dtype) for dtype, shape in kinds]
    arrived, _ = over(Packer(), Unpacker(), batch)

    assert [(tensor.dtype, tensor.shape) for tensor in arrived] == [(t.dtype, t.shape) for t in batch]
    assert all(map(torch.equal, arrived, batch))


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(
        TypeError, match=r"batch\.text\['f'\] is of type function, which cannot be pickled .*collate_fn"
    ):
        Packer().pack(Example(torch.ones(1), {"ok": 1, "f": lambda: 0}))


ALIKE = [
    ({"x": torch.ones(1), "y": "a"}, {"y": None, "x": torch.ones(2, 2)}),
    ([1, 2, 3], [1]),
    ([], [torch.ones(1)]),
    ((torch.ones(1), None), (torch.ones(2), {"extra": 1})),
    (Pair(1, [2]), Pair(torch.ones(1), [])),
    (Example(1, "a"), Example(None, None)),
    (UserDict(a=1), UserDict(a=2)),
    (3, "text"),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_values_may_differ_within_a_step(one, other):
    check_same_structure([one, other, one])
    check_same_structure([other, one])


DIFFERENT = [
    ({"x": 1}, {"x": 1, "y": 2}, "batch is a dict of ['x'] for process 0, but a dict of ['x', 'y'] for"),
    (
        {"a": {"x": 1}},
        {"a": {"y": 1}},
        "batch['a'] is a dict of ['x'] for process 0, but a dict of ['y'] for",
    ),
    ([1, {"x": 1}], [1, (1,)], "batch[1] is a dict of ['x'] for process 0, but a tuple of 1 for process 1"),
    ((1, 2), (1, 2, 3), "batch is a tuple of 2 for process 0, but a tuple of 3 for process 1"),
    (torch.ones(1), [torch.ones(1)], "batch is a Tensor for process 0, but a list of 1 for process 1"),
    (Example([1], 1), Example((1,), 1), "batch.ids is a list of 1 for process 0, but a tuple of 1 for"),
]


@pytest.mark.parametrize(("one", "other", "text"), DIFFERENT)
def test_structures_may_not_differ_within_a_step(one, other, text):
    with pytest.raises(TypeError) as caught:
        check_same_structure([one, other])
    assert text in str(caught.value)
    assert "collate_fn" in str(caught.value)
    with pytest.raises(TypeError, match="for process 2"):
        check_same_structure([one, one, other])


SEQUENCES = st.lists(
    st.sampled_from(
        [
            lambda: {"x": torch.ones(2), "y": torch.zeros(2)},
            lambda: {"y": torch.zeros(2), "x": torch.ones(2)},
            lambda: {"x": torch.ones(2), "y": "text"},
            lambda: {"x": torch.ones(2), "y": [torch.ones(1)]},
            lambda: {"x": torch.ones(2), "y": (torch.ones(1),)},
            lambda: {"x": torch.ones(2), "y": []},
            lambda: {"x": torch.ones(2), "y": ()},
            lambda: {1: torch.ones(2)},
            lambda: {True: torch.ones(2)},
            lambda: torch.ones(2),
            lambda: torch.ones(2, dtype=torch.int32),
            lambda: torch.ones(2, 1),
        ]
    ),
    max_size=12,
)


@given(SEQUENCES)
def test_any_sequence_of_structures_arrives(makes):
    packer, unpacker = Packer(), Unpacker()
    for make in makes:
        arrived, _ = over(packer, unpacker, make())

        assert repr(arrived) == repr(make())
