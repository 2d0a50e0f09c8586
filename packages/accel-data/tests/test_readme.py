import contextlib
import io
import re
import socket
from pathlib import Path

from torch.utils.data import DataLoader

from accel_data import prepare_data_loader

README = (Path(__file__).parents[1] / "README.md").read_text()


EXAMPLE = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL)[1]


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
