from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel import Accelerator, FullyShardedDataParallelPlugin
from accel.commands.estimate import main
from accel.estimate import formulas, sources
from accel.estimate.formulas import ModelSize, convert_bytes, training_bytes
from accel.estimate.mesh import BYTES
from accel.estimate.sources import find_tensors
from accel_ckpt.weights.files import save_weights
from accel_launch.errors import LaunchError
from accel_world.live_bytes import LiveBytes
from accel_world.pool import World

SIZE = ModelSize({f"{layer}.weight": (20, 5) for layer in range(10)}, buffers=10)


class Stack(nn.Module):
    """Three kinds of blocks, tied weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)) for _ in range(2))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))


PARAMETERS = 80 + 2 * (8 * 32 + 32 + 32 * 8 + 8)


def test_the_formula_of_each_engine() -> None:
    found = {engine: training_bytes(SIZE, "float32", engine, 4) for engine in formulas.ENGINES}

    assert found == {
        "one process": 16_000 + 40,
        "DDP": 20_000 + 40,
        "FSDP": 4_000 + 800 + 40,
        "ZeRO 1": 8_000 + 3_000 + 40,
        "ZeRO 2": 4_000 + 4_000 + 40,
        "ZeRO 3": 5_000 + 800 + 40,
    }


def test_optimizers_and_dtypes_count() -> None:
    assert training_bytes(SIZE, "bfloat16", "one process") == 8_000 + 20
    assert training_bytes(SIZE, "float32", "one process", optimizer="sgd") == 8_000 + 40
    assert training_bytes(SIZE, "float32", "one process", optimizer="momentum") == 12_000 + 40
    assert training_bytes(SIZE, "bfloat16", "ZeRO 1", 12) == 4_000 + 1_000 + 20  # K = 12, as in the paper
    assert training_bytes(SIZE, "int8", "DDP") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("float31", "DDP", 1, "adam"), "'float31' is not known; known: float32, bfloat16"),
        (("float32", "ddp", 1, "adam"), "'ddp' is not known; known: one process, DDP"),
        (("float32", "DDP", 0, "adam"), "processes=0 is not allowed"),
        (("float32", "DDP", 1, "lion"), "'lion' is not known; known: adam, momentum, sgd"),
    ],
)
def test_what_is_not_known_is_rejected(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        training_bytes(SIZE, *arguments)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KB"), (2**30, "1.0 GB"), (2**52, "4096.0 TB")],
)
def test_bytes_are_written_in_the_largest_unit(size: int, text: str) -> None:
    assert convert_bytes(size) == text


def test_a_callable_is_built_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_to_size.py").write_text(
        "from torch import nn\n"
        "def huge():\n    return nn.Sequential(nn.Linear(10**6, 10**6), nn.Linear(10**6, 1))\n"
        "def wrong():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    size = find_tensors("mine_to_size:huge").size

    assert size.parameters == 10**12 + 10**6 + 10**6 + 1
    assert (size.largest_block, size.block) == (10**12 + 10**6, "0")
    with pytest.raises(LaunchError, match="returned int; a torch"):
        find_tensors("mine_to_size:wrong")
    with pytest.raises(LaunchError, match=r"cannot be called: .*none.*Give package.module:callable"):
        find_tensors("mine_to_size:none")


@pytest.mark.parametrize("shard", ["5GB", "1KB"])
def test_headers_are_enough(tmp_path: Path, shard: str) -> None:
    save_weights(Stack().state_dict(), tmp_path, max_shard_size=shard)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shard == "1KB")
    for file in files:  # the weights themselves are not there any more
        data = file.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        file.write_bytes(data[:end])

    size = find_tensors(str(tmp_path)).size
    assert size.parameters == PARAMETERS + 3  # a header does not tell buffers from parameters
    assert (size.largest_block, size.block) == (8 * 32 + 32 + 32 * 8 + 8, "layers.0")


def test_modules_count_shared_parameters_once() -> None:
    size = ModelSize({name: tuple(item.shape) for name, item in Stack().named_parameters()}, buffers=3)

    assert (size.parameters, size.buffers, size.block) == (PARAMETERS, 3, "layers.0")
    with pytest.raises(ValueError, match="no parameters; there is nothing"):
        ModelSize({})


def test_a_config_is_enough(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the alone environment has no transformers")
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        architectures=["BertForMaskedLM"],
    )
    config.save_pretrained(tmp_path)

    model = transformers.BertForMaskedLM(config)
    assert find_tensors(str(tmp_path)).size.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./none", "There is no folder './none'"),
        ("none/model.safetensors", "There is no folder 'none/model.safetensors'"),
        ("one/two/three", "There is no folder 'one/two/three'"),
        (".", "neither safetensors files nor a config.json"),
        ("no_such_module_here:model", "cannot be called: No module named 'no_such_module_here'"),
    ],
)
def test_what_is_not_there_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=message):
        find_tensors(model)


def test_a_name_with_dots_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def from_config(place: str, trust_remote_code: bool) -> nn.Module:
        asked.append(place)
        return Stack()

    monkeypatch.setattr(sources, "_from_config", from_config)
    for name in ("some/Model-2.5-7B", "some-model_1.0"):
        assert find_tensors(name).size.parameters == PARAMETERS
    assert asked == ["some/Model-2.5-7B", "some-model_1.0"]


def test_a_missing_library_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(sys, "argv", ["accel-estimate-memory", str(tmp_path)])
    monkeypatch.setattr("warnings.showwarning", None)  # main sets it; monkeypatch puts it back

    assert main() == 2
    error = capsys.readouterr().err
    assert error.startswith("accel estimate-memory: error: transformers is needed here")
    assert "'./packages/accel[estimate]'" in error


def test_a_damaged_header_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(ValueError, match="not a safetensors file"):
        find_tensors(str(tmp_path))


def test_the_command_prints_a_table_and_json(tmp_path: Path) -> None:
    save_file({"a.0.w": torch.zeros(1000), "a.1.w": torch.zeros(24)}, tmp_path / "model.safetensors")

    def accel(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; from accel_launch.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "estimate-memory", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True)

    table = accel(".", "--dtypes", "float32", "int8", "--num_processes", "2")
    assert table.returncode == 0, table.stderr
    lines = table.stdout.splitlines()
    assert lines[0] == ".: 1,024 parameters; the largest block is a.0"
    assert lines[1] == "Memory on each device in kB (1,000 bytes)"
    assert " ".join(lines[5].split()) == "float32 4.00 4.10 16.38 20.48 16.19 14.34 12.29 18.24"
    assert lines[6].split()[-6:] == ["-"] * 6
    assert "KB" not in table.stdout

    found = json.loads(accel(".", "--json", "--dtypes", "float32").stdout)
    assert found["parameters"] == 1024
    assert found["bytes"]["float32"]["one process"] == 16 * 1024

    wrong = accel("./none")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "There is no folder './none'" in wrong.stderr


def test_the_command_estimates_a_mesh_by_the_plan_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_with_plan.py").write_text(
        "from torch import nn\n"
        "def planned():\n"
        "    model = nn.ModuleDict({'layers': nn.ModuleList([nn.Linear(8, 32), nn.Linear(32, 8)])})\n"
        "    model._tp_plan = {'layers.0': 'colwise', 'layers.1': 'rowwise'}\n"
        "    return model\n"
    )
    save_file({"layers.0.weight": torch.zeros(32, 8)}, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("warnings.showwarning", None)  # main sets it; monkeypatch puts it back

    def accel(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["accel-estimate-memory", *arguments])
        code = main()
        return code, *capsys.readouterr()

    axes = ("--dp_replicate_size", "3", "--dp-shard-size", "2", "--cp_size", "2", "--tp_size", "2")
    code, out, error = accel("mine_with_plan:planned", "--json", "--dtypes", "float32", "int8", *axes)
    assert code == 0, error
    found = json.loads(out)
    assert found["num_processes"] == 24
    # 16 x 8 and 16 of the first layer, 8 x 16 and 8 of the second; over four processes a quarter of the rows
    assert found["mesh_bytes"]["float32"]["parameters"] == 4 * (4 * 8 + 4 + 2 * 16 + 2)
    assert found["mesh_bytes"]["float32"]["gathered"] == 2 * 4 * (16 * 8 + 16)
    assert set(found["mesh_bytes"]["int8"].values()) == {None}

    _, out, _ = accel(".", "--dtypes", "float32", "--dp_shard_size", "2")  # headers are enough without a plan
    assert "dp_replicate 1 x dp_shard 2 x cp 1 x tp 1, on the process that needs the most" in out
    assert " ".join(out.splitlines()[-3].split()) == "float32 0.51 0.51 1.02 2.05 0.00 0.00 4.10"

    for arguments, message in (
        ((".", "--tp_size", "2"), "--tp_size 2 splits weights by the plan of a model"),
        (("mine_with_plan:planned", "--tp_size", "3"), "does not divide by tp_size=3"),
        ((".", "--cp_size", "0"), "--cp_size 0 is not allowed; allowed: 1 or more"),
        ((".", "--dp_shard_size", "2", "--num_processes", "4"), "dp_shard(2) * cp(1) * tp(1) = 2, and --num"),
    ):
        code, out, error = accel(*arguments)
        assert (code, out) == (2, ""), error
        assert message in error


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_an_engine_and_the_mesh_of_its_one_axis_have_one_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], axis: str
) -> None:
    shapes = {"embed.w": (60, 10), "layers.0.w": (10, 10), "layers.1.w": (10, 10), "head.w": (7, 10)}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    monkeypatch.setattr("warnings.showwarning", None)  # main sets it; monkeypatch puts it back
    arguments = [str(tmp_path), "--json", "--dtypes", "float32", f"--{axis}_size", "4"]
    monkeypatch.setattr(sys, "argv", ["accel-estimate-memory", *arguments])
    assert main() == 0
    found = json.loads(capsys.readouterr().out)

    engine = {"dp_replicate": "DDP", "dp_shard": "FSDP"}[axis]
    assert found["mesh_bytes"]["float32"]["all"] == found["bytes"]["float32"][engine]


class Layer(nn.Sequential):
    """A layer of a stack, which FSDP shards separately."""


class Tower(nn.Module):
    """Equal layers, and a head that is in none of them."""

    _no_split_modules = ("Layer",)

    def __init__(self, layers: int, width: int, head: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(x)
        return result


def measure(
    engine: str, dtype: str, optimizer_name: str, sizes: tuple[int, int, int]
) -> tuple[dict[str, tuple[int, ...]], int, int]:
    """Train a few steps; returns the shapes, and the peaks of forward and backward, and of the step."""
    plugin = {"auto_wrap_policy": "transformer_based_wrap", "fsdp_version": 2}
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**plugin) if engine == "FSDP" else None
    )
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    with LiveBytes() as live:
        model: Any = Tower(*sizes).to(getattr(torch, dtype))
        shapes = {name: tuple(item.shape) for name, item in model.named_parameters()}
        model, optimizer = accelerator.prepare(model, kinds[optimizer_name](model.parameters(), lr=1e-3))
        for _ in range(3):  # the optimizer has its states after the first step
            live.peak = 0
            accelerator.backward(model(torch.ones(1, sizes[1], dtype=getattr(torch, dtype))).sum())
            backward, live.peak = live.peak, 0
            optimizer.step()
            step = live.peak
            optimizer.zero_grad()
    return shapes, backward, step


@pytest.mark.parametrize("sizes", [(20, 128, 10), (8, 128, 2000)], ids=["layers", "head"])
@pytest.mark.parametrize(
    ("engine", "processes", "dtype", "optimizer"),
    [
        ("one process", 1, "float32", "adam"),
        ("one process", 1, "float32", "sgd"),
        ("one process", 1, "bfloat16", "adam"),
        ("DDP", 2, "float32", "adam"),
        ("FSDP", 2, "float32", "adam"),
        ("FSDP", 4, "float32", "adam"),
    ],
)
def test_the_estimate_is_within_a_tenth_of_the_measured_peak(
    world: World, engine: str, processes: int, dtype: str, optimizer: str, sizes: tuple[int, int, int]
) -> None:
    runs = world.run(measure, engine, dtype, optimizer, sizes, size=processes)
    shapes = runs[0][0]
    estimated = training_bytes(ModelSize(shapes), dtype, engine, processes, optimizer)
    largest = BYTES[dtype] * max(rows * math.prod(rest) for rows, *rest in shapes.values())

    assert estimated is not None
    assert max(backward for _, backward, _ in runs) == pytest.approx(estimated, rel=0.1)
    # A step computes parameter by parameter on the CPU, with two more tensors like each.
    assert max(step for _, _, step in runs) <= 1.1 * estimated + 2 * largest
