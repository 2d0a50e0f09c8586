from types import SimpleNamespace

import pytest
import torch

from accel_data.order.mesh import find_data_ranks, mesh_data_ranks


def mesh(names, *shape):
    ranks = torch.arange(torch.tensor(shape).prod().item()).reshape(shape)
    return SimpleNamespace(mesh=ranks, mesh_dim_names=names)


@pytest.mark.parametrize(
    ("names", "shape", "expected"),
    [
        (("dp",), (4,), [0, 1, 2, 3]),
        (("dp_shard", "tp"), (2, 2), [0, 0, 1, 1]),
        (("tp", "dp_shard"), (2, 2), [0, 1, 0, 1]),
        (("dp_replicate", "dp_shard", "cp", "tp"), (2, 2, 1, 2), [0, 0, 1, 1, 2, 2, 3, 3]),
        (("sp",), (3,), [0, 0, 0]),
    ],
)
def test_axes_of_the_same_data_are_left_out(names, shape, expected):
    assert mesh_data_ranks(mesh(names, *shape)) == dict(enumerate(expected))


def test_a_mesh_without_names_is_rejected():
    with pytest.raises(ValueError, match="mesh_dim_names"):
        mesh_data_ranks(mesh(None, 4))


def test_data_ranks_come_before_the_mesh_and_the_mesh_before_the_processes():
    grid = mesh(("dp_shard", "tp"), 2, 2)

    assert find_data_ranks(4, grid, [0, 1, 1, 0]) == {0: 0, 1: 1, 2: 1, 3: 0}
    assert find_data_ranks(4, grid, None) == {0: 0, 1: 0, 2: 1, 3: 1}
    assert find_data_ranks(2, None, None) == {0: 0, 1: 1}


@pytest.mark.parametrize("ranks", [[0, 0], [0, 0, 2, 2], [1, 1, 2, 2], [0, -1, 0, 1]])
def test_data_ranks_that_do_not_fit_are_rejected(ranks):
    with pytest.raises(ValueError, match="one entry for each of the 4 processes"):
        find_data_ranks(4, None, ranks)
