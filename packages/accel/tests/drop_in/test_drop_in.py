"""Turning the switch on in a running process, and what is untouched while it is off."""

from __future__ import annotations

OFF = """
import importlib.metadata, logging, os, subprocess, sys
def state():
    return dict(os.environ), list(sys.meta_path), list(sys.path), logging.getLogger("accel").parent
before = state()
import accel, accel.drop_in, accel.drop_in.finder
import accelerate
print(accelerate.__version__, importlib.metadata.version("accelerate"), accel.drop_in.is_active())
code = "import accelerate; print(accelerate.__version__)"
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout, end="")
try:
    accel.drop_in.activate()
except RuntimeError as error:
    print(error)
print(state() == before, accel.drop_in.is_active())
"""

ON = """
import subprocess, sys
import accel.drop_in
print(accel.drop_in.is_active())
accel.drop_in.activate()
finders = list(sys.meta_path)
accel.drop_in.activate()
print(sys.meta_path == finders, accel.drop_in.is_active())
import accelerate
print(accelerate.__name__)
code = "import accel.drop_in as d; d.activate(); import accelerate as a; print(d.is_active(), a.__name__)"
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout, end="")
print(subprocess.run(["accelerate", "--version"], capture_output=True, text=True).stdout, end="")
"""


def test_nothing_is_touched_without_the_switch(python, other):
    run = python("-c", OFF)

    lines = run.stdout.splitlines()
    assert lines[:2] == ["0.0.1 0.0.1 False", "0.0.1"], run.stderr
    assert f"accelerate has been imported already, from {other}/accelerate/__init__.py" in lines[2]
    assert "python -m accel.drop_in" in lines[2]
    assert lines[3:] == ["True False"]


def test_activate_turns_it_on_here_and_in_children(python):
    run = python("-c", ON)

    lines = run.stdout.splitlines()
    assert lines[:4] == ["False", "True True", "accel", "True accel"], run.stderr
    assert lines[4].startswith("accel ")


def test_activate_warns_where_children_would_not_notice(python):
    code = "import accel.drop_in; accel.drop_in.activate(); import accelerate; print(accelerate.__name__)"
    run = python("-E", "-c", code)

    assert run.stdout == "accel\n"
    assert "in this process alone: Python runs with -E, -I or -S" in run.stderr


NAMES = """
import accel.drop_in
accel.drop_in.activate()
from accelerate.commands.config.config_args import BaseConfig, SageMakerConfig
from accelerate.test_utils.testing import get_backend, run_command
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils.modeling import (
    _get_proper_dtype, compute_module_total_buffer_size, get_state_dict_from_offload
)
print(get_backend()[0], run_command(["echo", "text"], return_stdout=True), end="")
"""


def test_names_that_test_suites_and_clients_import_are_there(python):
    run = python("-c", NAMES)

    assert run.stdout.split()[-1:] == ["text"], run.stderr
