"""Models whose layers are spread over processes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from accel.inference import build_pipeline, find_pippy_batch_size, pippy_forward, prepare_pippy

pytestmark = pytest.mark.usefixtures("fresh_state")


@dataclass
class Output:
    """What the model returns: nested, with something that is no tensor."""

    logits: torch.Tensor
    hidden: list[torch.Tensor]
    scale: float
    nothing: None = None


class Block(nn.Module):
    """A layer that reads a mask, which all layers share, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("shift", torch.full((8,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dropout(torch.relu(self.linear(x))) * mask[:, None] + self.shift
        return out


class Net(nn.Module):
    """Keyword inputs, a weight that first and last layer share, and a connection that skips layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, extra: Any = None, scale: float = 1.0
    ) -> Output:
        first = hidden = self.embed(tokens)
        states = []
        for block in self.blocks:
            hidden = block(hidden, mask)
            states.append(hidden)
        if extra is not None:
            hidden = hidden + extra["bias"]
        return Output(self.head(hidden + first) * scale, states[:2], scale)


def make() -> Net:
    torch.manual_seed(0)
    return Net().double()


def inputs(batch: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(batch)
    return {
        "tokens": torch.randint(0, 10, (batch,), generator=generator),
        "mask": torch.rand(batch, generator=generator).double(),
        "extra": {"bias": torch.rand(batch, 8, generator=generator).double()},
        "scale": 2.0,
    }


def same(found: Output, expected: Output) -> bool:
    """Compare outputs but for rounding: chunks are multiplied in other shapes than the batch."""
    pairs = [(found.logits, expected.logits), *zip(found.hidden, expected.hidden, strict=True)]
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in pairs) and (
        found.scale,
        found.nothing,
        len(found.hidden),
    ) == (2.0, None, 2)


def run(
    split_points: Any, batches: list[int], gather: bool, example: int = 4, **options: Any
) -> list[bool | None]:
    """Run batches of several sizes; say for each whether the output is that of the plain model."""
    model, plain = make(), make().eval()
    prepared = prepare_pippy(
        model, split_points, example_kwargs=inputs(example), gather_output=gather, **options
    )
    assert prepared is model
    assert not model.training
    found: list[bool | None] = []
    for batch in batches:
        output = model(**inputs(batch))
        with torch.no_grad():
            expected = plain(**inputs(batch))
        found.append(None if output is None else same(output, expected))
    return found


SPLITS = {2: ["blocks.2"], 3: ["blocks.1", "blocks.3"], 4: ["blocks.1", "blocks.2", "head"]}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_last_process_has_the_output_of_the_plain_model(world: Any, size: int) -> None:
    found = world.run(run, SPLITS[size], [4, 1, 3, 9], False, size=size)

    assert found[-1] == [True] * 4
    assert found[:-1] == [[None] * 4] * (size - 1)


@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_every_process_has_the_output_on_request(world: Any, chunks: int) -> None:
    found = world.run(run, SPLITS[2], [4, 5, 2], True, num_chunks=chunks)

    assert found == [[True] * 3] * 2


@pytest.mark.parametrize("size", [2, 4])
def test_automatic_stages(world: Any, size: int) -> None:
    found = world.run(run, "auto", [4, 3], True, size=size, no_split_module_classes=["Block"])

    assert found == [[True, True]] * size


def test_a_split_inside_of_a_layer(world: Any) -> None:
    assert world.run(run, ["blocks.1.dropout"], [4, 6], True) == [[True] * 2] * 2


def test_one_process_runs_the_plain_model() -> None:
    assert run("auto", [4, 3], False) == [True, True]
    assert run([], [4], True) == [True]


def by_position() -> tuple[list[bool], bool]:
    """Pass by position what the example has by name, and the other way round."""
    model, plain = make(), make().eval()
    expected = plain(**inputs(4))
    prepare_pippy(model, SPLITS[2], example_kwargs=inputs(4), gather_output=True)
    names = inputs(4)
    first = model(*names.values())
    second = model(names.pop("tokens"), **names)
    return [same(first, expected), same(second, expected)], first.logits.requires_grad


def test_inputs_by_position_and_by_name(world: Any) -> None:
    assert world.run(by_position) == [([True, True], False)] * 2


def parts() -> Any:
    """Use the two functions that prepare_pippy is made of."""
    model, plain = make(), make().eval()
    forward = build_pipeline(model, SPLITS[2], (), inputs(4), 2)
    traces = [name for name, part in model.named_modules() if "forward" in vars(part)]
    output = pippy_forward(forward, 2, False, **inputs(3))
    kept = same(model(**inputs(3)), plain(**inputs(3)))
    return traces, kept, None if output is None else same(output, plain(**inputs(3)))


def test_a_pipeline_leaves_the_model_as_it_was(world: Any) -> None:
    assert world.run(parts) == [([], True, None), ([], True, True)]


class Chooser(nn.Module):
    """Branches on a value, which cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = self.first(x)
        out: torch.Tensor = self.second(x)
        return out


class Unused(Chooser):
    """Never calls its last layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x)
        return out


class Averages(Chooser):
    """Returns something without a batch."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"mean": self.second(self.first(x)).mean()}


class Opaque(Chooser):
    """Returns something that is no tensor."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x)), object()


def message(kind: type[nn.Module], split_points: Any, *args: Any, **kwargs: Any) -> str:
    """Return the message of the error that preparing raises."""
    model = kind()
    try:
        prepare_pippy(model, split_points, example_args=args, **kwargs)
    except (ValueError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("kind", "split_points", "options", "expected"),
    [
        (Chooser, ["second"], {}, "RuntimeError: Chooser cannot be cut .* torch.export cannot trace it: "),
        (Unused, ["second"], {}, r"ValueError: 1 split points \(second\) give 1 stages, not 2"),
        (
            Averages,
            ["second"],
            {},
            r"ValueError: output\['mean'\] \(Tensor\) has the shape \[\] for a chunk of 1",
        ),
        (Opaque, ["second"], {}, r"ValueError: output\[1\] \(object\) cannot be cut"),
        (
            Unused,
            ["third"],
            {},
            "ValueError: split_points has 'third', which is not a module of Unused. It has: first",
        ),
        (Unused, [], {}, "ValueError: 2 processes need 1 different split points.*has 0"),
        (Unused, ["first", "second"], {}, "ValueError: 2 processes need 1 different split points.*has 2"),
        (Unused, "second", {}, "ValueError: split_points must be 'auto' or a list"),
        (Unused, ["second"], {"num_chunks": 0}, "ValueError: num_chunks=0"),
        (Unused, ["second"], {"example_kwargs": {"y": 1}}, "TypeError: .*'y'"),
    ],
)
def test_what_cannot_be_cut_is_named(
    world: Any, kind: type[nn.Module], split_points: Any, options: dict[str, Any], expected: str
) -> None:
    for found in world.run(message, kind, split_points, torch.ones(2, 2), **options):
        assert re.match(expected, found), found


def refusal(change: dict[str, Any]) -> str:
    """Call a prepared model as it was not traced."""
    model = prepare_pippy(make(), SPLITS[2], example_kwargs=inputs(4))
    with pytest.raises(ValueError) as caught:
        model(**{**inputs(4), **change})
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"scale": 3.0}, "traced with scale=2.0, but called with 3.0"),
        ({"mask": torch.rand(3)}, "mask [3]"),
        ({"extra": None}, "called with extra, mask, scale, tokens"),
        ({"mask": torch.tensor(1.0)}, "mask []"),
    ],
)
def test_calls_unlike_the_example_are_named(world: Any, change: dict[str, Any], expected: str) -> None:
    assert all(expected in found for found in world.run(refusal, change))


def test_the_batch_size_of_inputs() -> None:
    assert find_pippy_batch_size((1, torch.ones(3, 2)), {"a": torch.ones(5)}) == 3
    assert find_pippy_batch_size((), {"a": {"b": torch.ones(5)}}) == 5
    assert find_pippy_batch_size(("text",), None) is None
    assert find_pippy_batch_size(None, {"a": torch.tensor(1.0)}) is None
