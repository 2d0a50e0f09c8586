from types import SimpleNamespace

import pytest
import torch

from accel_data.mesh import data_ranks


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
    assert data_ranks(mesh(names, *shape)) == dict(enumerate(expected))


def test_a_mesh_without_names_is_refused():
    with pytest.raises(ValueError, match="mesh_dim_names"):
        data_ranks(mesh(None, 4))
