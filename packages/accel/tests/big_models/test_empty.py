"""Models that are built on the meta device, or on another one, from the start."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import accel
from accel.big_modeling import init_empty_weights, init_on_device
from accel_ckpt.weights.load import load_checkpoint_in_model

META = torch.device("meta")


class Net(nn.Module):
    """A parameter that three modules share, a buffer, and a tensor that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        tied = nn.Parameter(torch.zeros(2))
        self.first, self.second = nn.Module(), nn.Module()
        self.first.weight = self.second.weight = tied
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("nothing", None)
        self.scale = torch.arange(3.0)


def test_parameters_are_on_meta_and_buffers_are_real() -> None:
    with init_empty_weights():
        model = Net()

    assert {parameter.device for parameter in model.parameters()} == {META}
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    assert torch.equal(model.norm.running_var, torch.ones(4))
    assert model.scale.tolist() == [0, 1, 2]
    assert Net().head.weight.device.type == "cpu"


def test_buffers_too() -> None:
    with init_empty_weights(include_buffers=True):
        model = Net()

    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {META}
    assert model.scale.tolist() == [0, 1, 2]


def test_the_variable_decides_where_the_argument_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "true")
    with accel.init_empty_weights():
        assert nn.BatchNorm1d(4).running_var.device == META
    with accel.init_on_device(META):
        assert nn.BatchNorm1d(4).running_var.device == META
    with init_empty_weights(include_buffers=False):
        assert nn.BatchNorm1d(4).running_var.device.type == "cpu"


def test_shared_parameters_stay_shared() -> None:
    with init_empty_weights():
        model = Net()

    assert model.head.weight is model.embed.weight
    assert model.first.weight is model.second.weight
    assert len(list(model.parameters())) == 4


def test_a_model_beyond_all_memory_is_built() -> None:
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(1 << 12, 1 << 12, bias=False) for _ in range(4096)))

    assert sum(parameter.nbytes for parameter in model.parameters()) == 1 << 38  # 256 GiB


def test_kinds_of_parameters_are_kept() -> None:
    class Marked(nn.Parameter):
        pass

    with init_empty_weights():
        model = nn.Module()
        model.whole = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
        mark = Marked(torch.zeros(3))
        mark.note = "kept"
        model.mark = mark
        model.lazy = nn.LazyLinear(3)

    assert (model.whole.dtype, model.whole.requires_grad) == (torch.int8, False)
    assert (type(model.mark), model.mark.note, model.mark.requires_grad) == (Marked, "kept", True)
    model.lazy(torch.empty(1, 2, device="meta"))
    assert (model.lazy.weight.shape, model.lazy.weight.device) == ((3, 2), META)


def test_an_error_inside_ends_it_too() -> None:
    with pytest.raises(RuntimeError, match="inside"), init_empty_weights():
        raise RuntimeError("inside")

    assert nn.Linear(1, 1).weight.device.type == "cpu"


def test_another_thread_builds_as_ever() -> None:
    built: list[nn.Module] = []
    with init_empty_weights():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(1, 1)))
        thread.start()
        thread.join()

    assert built[0].weight.device.type == "cpu"


def test_one_device_inside_another() -> None:
    with init_empty_weights():
        with init_on_device("cpu"):
            assert nn.Linear(1, 1).weight.device.type == "cpu"
        assert nn.Linear(1, 1).weight.device == META


def test_modules_that_were_there_before_are_left_alone() -> None:
    before = nn.Linear(1, 1)
    with init_empty_weights():
        model = nn.Sequential(before)

    assert model[0].weight is before.weight
    assert before.weight.device.type == "cpu"


def test_a_checkpoint_fills_an_empty_model(tmp_path: Path) -> None:
    saved = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)}
    save_file(saved, tmp_path / "model.safetensors")
    with init_empty_weights():
        model = nn.Linear(3, 2)
    load_checkpoint_in_model(model, tmp_path, device_map={"": "cpu"})

    assert model.weight.tolist() == saved["weight"].tolist()
    assert model(torch.ones(1, 3)).tolist() == [[4.0, 13.0]]
