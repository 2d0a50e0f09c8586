import contextlib
import io
import socket
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import accel_data
from accel_data import prepare_data_loader
from accel_world import readme

README = (Path(__file__).parents[1] / "README.md").read_text()


SHORT, EXAMPLE, AUGMENTED = readme.examples(__file__)


def epochs():
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        readme.run(SHORT)
    return [eval(line.split(maxsplit=1)[1]) for line in told.getvalue().splitlines()]


def test_the_first_example_has_one_order_on_any_number_of_processes(world):
    assert readme.num_lines(SHORT) <= readme.MOST_LINES
    (alone,), both = world.run(epochs, size=1), world.run(epochs, size=2)
    for epoch in range(2):
        assert sorted(sample for batch in alone[epoch] for sample in batch) == [*range(10)]
        steps = [batch for pair in zip(both[0][epoch], both[1][epoch], strict=True) for batch in pair]
        assert steps[:5] == alone[epoch]


def test_the_example_runs_alone(fresh_state, capsys):
    exec(compile(EXAMPLE, "README.md", "exec"), {"__name__": "__main__"})

    assert "epoch 2: loss 0.000, 16 samples per step" in capsys.readouterr().out


def run_example():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(EXAMPLE, "README.md", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def test_the_example_runs_on_two_processes(world):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}

    for printed in world.run(run_example, size=2, init=False, env=address):
        assert "epoch 2: loss 0.000, 32 samples per step" in printed


def test_the_augmented_dataset_gives_the_same_on_any_number_of_processes(fresh_state):
    names = {
        "Dataset": Dataset,
        "accel_data": accel_data,
        "torch": torch,
        "load": lambda index: (torch.zeros(2), index),
        "transform": lambda image: image + torch.rand(2),
    }
    exec(compile(AUGMENTED, "README.md", "exec"), names)
    names["Images"].__len__ = lambda self: 6

    def images(processes):
        found = {}
        for rank in range(processes):
            loader = DataLoader(names["Images"](), 2, shuffle=True)
            place = {"num_processes": processes, "process_index": rank, "data_seed": 1}
            for batch, labels in prepare_data_loader(loader, **place):
                found.update(zip(labels.tolist(), batch.tolist(), strict=True))
        return found

    assert images(1) == images(2) == images(3)
    assert len({tuple(image) for image in images(1).values()}) == 6


def test_the_table_of_shares_is_the_real_one(fresh_state):
    options = {
        "default": ({}, {}),
        "`even_batches=False`": ({}, {"even_batches": False}),
        "`DataLoader(drop_last=True)`": ({"drop_last": True}, {}),
        "`split_batches=True`": ({}, {"split_batches": True}),
    }
    for name, (loader_options, prepare_options) in options.items():
        shown = []
        for rank in range(2):
            place = {"num_processes": 2, "process_index": rank}
            loader = prepare_data_loader(
                DataLoader(range(10), 2, **loader_options), **place, **prepare_options
            )
            texts = []
            for batch in loader:
                real = loader.real_samples[rank] if loader.real_samples else len(batch)
                texts.append(" ".join(f"{s}{'*' * (i >= real)}" for i, s in enumerate(batch.tolist())))
            shown.append(", ".join(texts))
        assert f"| {name} | {shown[0]} | {shown[1]} |" in README
