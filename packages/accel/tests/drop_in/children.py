"""A program with the switch on whose children find accel as well, however they are started.

`children.py activate` turns the switch on by itself; further arguments are the checks to run, by default all.
"""

import importlib.metadata
import multiprocessing
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import checks

# Not in the children of multiprocessing, which import this file too and must find the switch by themselves.
if __name__ == "__main__" and "activate" in sys.argv:
    import accel.drop_in

    accel.drop_in.activate()


def who() -> tuple[str, str]:
    import accelerate

    return accelerate.__name__, importlib.metadata.version("accelerate")


class Answers:
    """A dataset that knows which accelerate its workers import."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> str:
        return " ".join(who())


SWITCHED = who()


def check_this_process():
    assert SWITCHED[0] == "accel"


def check_processes_of_multiprocessing():
    for method in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.apply(who) == SWITCHED, method


def check_workers_of_loaders():
    from torch.utils.data import DataLoader

    for method in ("spawn", "fork"):
        loader = DataLoader(Answers(), batch_size=2, num_workers=1, multiprocessing_context=method)
        assert list(loader) == [[" ".join(SWITCHED)] * 2], method


def started(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def check_a_python_that_it_starts():
    code = "import accelerate; print(accelerate.__name__)"
    # And one that this one starts.
    outer = f"import sys, subprocess; subprocess.run([sys.executable, '-c', {code!r}])"
    assert started(sys.executable, "-c", outer) == "accel\n"


def check_workers_of_pytest():
    with tempfile.TemporaryDirectory() as folder:
        code = "import accelerate, os\ndef test_a():\n    assert 'PYTEST_XDIST_WORKER' in os.environ"
        Path(folder, "test_a.py").write_text(f"{code}\n    assert accelerate.__name__ == 'accel'\n")
        assert "1 passed" in started(
            sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", folder
        )


def check_the_commands():
    assert "usage: accel launch" in started(sys.executable, "-m", "accelerate.commands.launch", "--help")
    assert "usage: accel config" in started(sys.executable, "-m", "accelerate.commands.config", "--help")
    cli = (sys.executable, "-m", "accelerate.commands.accelerate_cli")
    assert started(*cli, "--version") == started("accelerate", "--version") != ""
    for name in ("config", "launch", "estimate-memory", "merge-weights"):
        assert "usage: accel" in started(f"accelerate-{name}", "--help"), name


def check_a_program_that_the_command_launches():
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        # One write: two processes share the pipe.
        script.write_text("import os, accelerate\nos.write(1, (accelerate.__name__ + chr(10)).encode())")
        assert started("accelerate", "launch", "--cpu", str(script)) == "accel\n"
        assert started("accelerate-launch", "--cpu", "--num_processes", "2", str(script)) == "accel\n" * 2


if __name__ == "__main__":
    chosen = [f"check_{name}" for name in sys.argv[2:]]
    checks.run({name: value for name, value in globals().items() if not chosen or name in chosen})
