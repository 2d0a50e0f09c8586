"""Bundles of a step that is not finite, and `accel replay`, which recomputes its losses bit for bit."""

from __future__ import annotations

import gc
import math
import os
import re
import runpy
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.commands.replay import replay_command, replay_command_parser
from accel.observe.guard import GuardKwargs
from accel.observe.guard.batch import BatchError, decode, encode
from accel.observe.statistics import StatisticsKwargs
from accel_data.loader.shard import DataLoaderShard
from accel_launch.errors import LaunchError
from accel_world.leaks import reset_singletons

pytestmark = pytest.mark.usefixtures("fresh_state")

SCRIPT = """
import sys
import warnings

import torch
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.observe.guard import GuardKwargs


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        x = torch.rand(3) + torch.rand(1)  # drawn again each time
        return {"x": x * float("inf") if index == 7 else x, "index": index}


def train(bundle, steps=1, weighted=False, change=1.0):
    torch.manual_seed(1)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=steps, kwargs_handlers=[GuardKwargs("skip", bundle=bundle)]
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    )
    model.register_buffer("calls", torch.zeros(()))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    loader = DataLoader(Rows(), 4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            x = batch.pop("x")  # the guard keeps what the loader gave
            inner = accelerator.unwrap_model(model)
            inner.calls.add_(1)
            out = model(x).square() * change + torch.rand(1) + inner.calls
            if weighted:
                accelerator.backward(out.sum(), weight=len(x) + accelerator.process_index)
            else:
                accelerator.backward(out.mean())
            optimizer.step()
            optimizer.zero_grad()
            seen.append(batch["index"].tolist())
    accelerator.end_training()
    return seen


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    bundle, steps, weighted = sys.argv[1:4]
    train(bundle, int(steps), weighted == "weighted", float(sys.argv[4]) if sys.argv[4:] else 1.0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train_it.py"
    path.write_text(SCRIPT)
    return path


def train(path: str, *arguments: Any) -> Any:
    names: dict[str, Any] = {"__name__": "train_it"}
    exec(compile(Path(path).read_text(), path, "exec"), names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return names["train"](*arguments)


def replay(monkeypatch: pytest.MonkeyPatch, *tokens: Any) -> int:
    """Run the command in this process, which is what it was before afterwards."""
    reset_singletons()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", list(sys.argv))
        patch.setattr(sys, "path", list(sys.path))
        patch.chdir(Path.cwd())
        environment, threads = dict(os.environ), torch.get_num_threads()
        try:
            return replay_command(replay_command_parser().parse_args([str(token) for token in tokens]))
        finally:
            torch.set_num_threads(threads)
            os.environ.clear()
            os.environ.update(environment)
            reset_singletons()


@pytest.mark.parametrize(("steps", "weighted"), [(1, False), (2, False), (3, True)])
def test_a_bundle_recomputes_its_losses_bit_for_bit(
    script: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, steps: int, weighted: bool
):
    seen = train(str(script), str(tmp_path / "bundles"), steps, weighted)
    (bundle,) = (tmp_path / "bundles").iterdir()
    bad = next(index for index, indices in enumerate(seen) if 7 in indices)
    window = bad // steps
    assert bundle.name == f"step_{window + 1}"
    which = "weighted" if weighted else "plain"

    assert replay(monkeypatch, bundle, script, tmp_path / "none", 1, which) == 0
    out = capsys.readouterr().out
    for number, indices in enumerate(seen[window * steps :][:steps]):
        place = f"batch {window * steps + number} of epoch 0 of loader 0, samples {re.escape(str(indices))}"
        assert re.search(rf"Micro-batch {number + 1} of {steps}: {place}\n  loss recorded .* the same\n", out)
    assert "The first tensor of a batch that is not finite: batch['x']" in out
    assert "The first module whose output is not finite: 0 (Linear)" in out
    assert "The first parameter in backward whose gradient is not finite: 3." in out
    assert out.endswith("All losses are the same.\n")
    if steps > 1:  # finite losses too, which hold more than that all is NaN
        assert re.search(r"loss recorded \d.*: the same", out)

    # A script that computes something else is seen, in the last bits too.
    assert replay(monkeypatch, bundle, script, tmp_path / "none", 1, which, 1.000004) == int(steps > 1)


def test_the_script_and_its_arguments_are_those_of_the_run(
    script: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
):
    with monkeypatch.context() as patch, warnings.catch_warnings():
        patch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        patch.setattr(sys, "argv", [str(script), "bundles", "2", "weighted"])
        patch.chdir(tmp_path)
        runpy.run_path(str(script), run_name="__main__")
    (bundle,) = (tmp_path / "bundles").iterdir()
    assert replay(monkeypatch, bundle) == 0
    assert capsys.readouterr().out.endswith("All losses are the same.\n")


def on_ranks(script: str, bundle: str, weighted: bool) -> None:
    train(script, bundle, 2, weighted)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_bundle_of_one_rank_of_two(
    world: Any, script: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, weighted: bool
):
    world.run(on_ranks, str(script), str(tmp_path / "bundles"), weighted)
    (bundle,) = (tmp_path / "bundles").iterdir()
    (window,) = bundle.glob("guard_rank_*.bin")  # that of the rank with the loss alone
    rank = int(window.stem[-1])
    which = "weighted" if weighted else "plain"
    assert replay(monkeypatch, bundle, script, tmp_path / "none", 1, which) == 0
    out = capsys.readouterr().out
    assert f"rank {rank} of 2." in out
    assert re.search(r"loss recorded \d.*: the same", out)
    assert out.endswith("All losses are the same.\n")
    for arguments in (("--rank", 1 - rank, bundle, script), (bundle, "--rank", 1 - rank)):
        with pytest.raises(LaunchError, match=rf"no window of rank {1 - rank}; it has those of \[{rank}\]"):
            replay(monkeypatch, *arguments)


def make(folder: Path, **settings: Any) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[GuardKwargs(bundle=folder, **settings)])
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(torch.ones(3, 1)))


def bad_steps(parts: tuple[Any, ...]) -> list[str]:
    accelerator, model, optimizer, loader = parts
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for batch in loader:
            accelerator.backward(model(batch).sum() * math.inf)
            optimizer.step()
            optimizer.zero_grad()
    return [str(item.message) for item in seen]


CLOSURE_SCRIPT = """
import sys

import torch
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.observe.guard import GuardKwargs

torch.manual_seed(1)
accelerator = Accelerator(cpu=True, kwargs_handlers=[GuardKwargs("skip", bundle=sys.argv[1])])
model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Dropout(0.5))
data = torch.rand(12, 3)
data[7] = float("inf")
optimizer = torch.optim.LBFGS(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 4))
for batch in loader:

    def closure():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        return loss.detach()

    optimizer.step(closure)
"""


def test_a_loop_whose_optimizer_takes_a_closure(tmp_path: Path, monkeypatch: Any, capsys: Any):
    script = tmp_path / "closure.py"
    script.write_text(CLOSURE_SCRIPT)
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", [str(script), str(tmp_path / "bundles")])
        runpy.run_path(str(script), run_name="__main__")
    assert replay(monkeypatch, tmp_path / "bundles" / "step_2") == 0
    out = capsys.readouterr().out
    assert out.count("the same\n") == 1
    assert out.endswith("All losses are the same.\n")


def test_no_more_bundles_than_requested_and_none_is_overwritten(tmp_path: Path):
    (tmp_path / "step_1").mkdir()
    texts = bad_steps(make(tmp_path, max_bundles=2, action="skip"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_1_2", "step_2"]
    assert f"To recompute it: accel replay {tmp_path / 'step_1_2'}" in texts[0]
    assert "accel replay" not in texts[2]


def test_a_folder_that_cannot_be_written_does_not_end_training(tmp_path: Path):
    (tmp_path / "file").write_text("")
    texts = bad_steps(make(tmp_path / "file" / "bundles", action="skip"))
    assert len(texts) == 3
    assert "No bundle could be written (" in texts[0]


def test_automatic_names_of_checkpoints_are_not_used(tmp_path: Path):
    parts = make(tmp_path / "bundles", action="skip")
    config = parts[0].project_configuration
    config.automatic_checkpoint_naming = True
    config.set_directories(str(tmp_path / "project"))
    bad_steps(parts)
    assert (tmp_path / "bundles" / "step_1" / "model.safetensors").is_file()
    assert not (tmp_path / "project").exists()
    assert config.automatic_checkpoint_naming


def test_missing_and_damaged_bundles_are_errors(tmp_path: Path, script: Path, monkeypatch: Any, capsys: Any):
    with pytest.raises(LaunchError, match=r"is no bundle: it has no guard\.json"):
        replay(monkeypatch, tmp_path, script)
    train(str(script), str(tmp_path / "bundles"))
    (bundle,) = (tmp_path / "bundles").iterdir()
    arguments = (bundle, script, tmp_path / "none", 1, "plain")
    weights = bundle / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert replay(monkeypatch, *arguments) == 2
    assert "model.safetensors" in capsys.readouterr().err
    weights.write_bytes(whole)
    window = bundle / "guard_rank_0.bin"
    window.write_bytes(window.read_bytes()[:100])
    assert replay(monkeypatch, *arguments) == 2
    assert "guard_rank_0.bin" in capsys.readouterr().err
    (bundle / "guard.json").write_text("{")
    with pytest.raises(LaunchError, match=r"guard\.json is damaged"):
        replay(monkeypatch, *arguments)


def test_a_script_that_ends_or_fails_before_is_code_2(
    tmp_path: Path, script: Path, monkeypatch: Any, capsys: Any
):
    train(str(script), str(tmp_path / "bundles"))
    (bundle,) = (tmp_path / "bundles").iterdir()
    other = tmp_path / "other.py"
    for text, said in (("", "ended"), ("raise SystemExit(3)", r"exited \(3\)"), ("1 / 0", "failed")):
        other.write_text(text)
        assert replay(monkeypatch, bundle, other) == 2
        assert re.search(f"the script {said} before", capsys.readouterr().err)
    with pytest.raises(LaunchError, match="which is not here"):
        replay(monkeypatch, bundle, tmp_path / "missing.py")


class Pair(NamedTuple):
    x: Any
    y: Any


def test_batches_of_any_structure_come_back():
    batch = Pair({"a": [torch.ones(2), "text", 3], "b": (None, 2.5)}, torch.arange(6).view(2, 3).T)
    other = Pair({"a": [torch.zeros(2), "other", 4], "b": (None, 0.0)}, torch.zeros(3, 2))
    found = decode(encode(batch), other, torch.device("cpu"))
    assert type(found) is Pair
    assert found.x["a"][1:] == ["text", 3]
    assert found.x["b"] == (None, 2.5)
    assert torch.equal(found.x["a"][0], torch.ones(2))
    assert torch.equal(found.y, batch.y)
    with pytest.raises(BatchError, match=r"no .*Pair"):
        decode(encode(batch), [1], torch.device("cpu"))
    with pytest.raises(BatchError, match="has a object"):
        decode(encode([object()]), None, torch.device("cpu"))


def test_statistics_next_to_it(tmp_path: Path):
    handlers = [StatisticsKwargs(), GuardKwargs(bundle=tmp_path, action="skip")]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    parts = accelerator, *accelerator.prepare(model, optimizer, DataLoader(torch.ones(3, 1)))
    assert len(bad_steps(parts)) == 3
    assert (tmp_path / "step_1" / "guard_rank_0.bin").is_file()
    accelerator.end_training()
    _, _, optimizer, loader = parts
    assert type(loader).__mro__[0] is DataLoaderShard
    assert not {"step"} & vars(optimizer).keys()
    assert not {"backward"} & vars(accelerator.engine).keys()


def test_free_memory_frees_what_is_guarded(tmp_path: Path):
    accelerator, *prepared = make(tmp_path, action="skip")
    bad_steps((accelerator, *prepared))
    held = [weakref.ref(item) for item in prepared]
    prepared.clear()
    accelerator.free_memory()
    gc.collect()
    assert [item() for item in held] == [None] * 3
    accelerator.end_training()
