"""macOS and Windows, as far as Linux can show them: without what they lack, accel is imported and used.

What the other system does not have of Python's modules, and of the names in `os`, `signal` and others, is
removed in its own process, after torch was imported. Other builds of torch are not covered.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path

from repo_checks.tree import BELOW, packages

ROOT = Path(__file__).parents[1]
MODULES = [
    module.name
    for package in packages(ROOT).values()
    for module in package.modules
    if not module.name.endswith("__main__")
]

# Import names of every extra, which `hatch run lint:check` knows by their distributions.
OPTIONAL = """
IPython PIL aim apex bitsandbytes clearml comet_ml datasets deepspeed dvclive google lomo_optim megatron
mlflow msamp pandas peft psutil ray rich sagemaker schedulefree sklearn smdistributed swanlab tensorboard timm
torch_mlu torch_musa torch_npu torch_sdaa torch_xla torchao torchdata tqdm trackio transformer_engine
transformers wandb
"""
# By "Availability" in the manual of Python's library.
WINDOWS_LACKS = {
    "modules": "_posixsubprocess fcntl grp pty pwd resource syslog termios tty",
    "os": """
    WNOHANG fork forkpty getegid geteuid getgid getgroups getloadavg getpgid getpgrp getpriority getsid getuid
    killpg mkfifo nice openpty posix_fadvise posix_fallocate posix_spawn pread preadv pwrite pwritev
    register_at_fork sched_getaffinity sched_setaffinity sched_yield sendfile setpgid setpriority setsid
    statvfs sync sysconf uname wait wait3 wait4 waitid O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_SYNC
    """,
    "signal": """
    SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGRTMAX SIGRTMIN SIGSTOP SIGTSTP SIGTTIN
    SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGWINCH SIGXFSZ alarm pause pthread_kill pthread_sigmask setitimer
    siginterrupt sigwait
    """,
    "select": "epoll poll",
    "socket": "AF_UNIX",
    "mmap": """
    MADV_DONTNEED MADV_HUGEPAGE MADV_SEQUENTIAL MADV_WILLNEED MAP_PRIVATE MAP_SHARED PROT_READ PROT_WRITE
    """,
    "faulthandler": "register unregister",
}
MACOS_LACKS = {
    "modules": "",
    "os": """
    O_DIRECT O_TMPFILE eventfd memfd_create pidfd_open posix_fadvise posix_fallocate sched_getaffinity
    sched_setaffinity
    """,
    "signal": "SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT sigtimedwait sigwaitinfo",
    "select": "epoll",
    "socket": "AF_NETLINK SOCK_CLOEXEC",
    "mmap": "MADV_HUGEPAGE",
    "fcntl": "F_SETLEASE F_SETSIG",
}
LACKS = {"win32": WINDOWS_LACKS, "darwin": MACOS_LACKS}


class Without:
    """A finder of modules that does not find some."""

    def __init__(self, finder, blocked):
        self.finder, self.blocked = finder, blocked

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


def block(names) -> None:
    for name in [loaded for loaded in sys.modules if loaded.partition(".")[0] in names]:
        del sys.modules[name]
    sys.meta_path[:] = [Without(finder, names) for finder in sys.meta_path]
    sys.path_importer_cache.clear()


def pretend(system: str) -> None:
    """Be another system from now on; our packages are imported again."""
    block(frozenset(OPTIONAL.split()))
    for name in MODULES:  # all of torch and Python that they import: it is built for the system where it is
        import_module(name)
    lacks = LACKS[system]
    for holder in lacks.keys() - {"modules"}:
        module = import_module(holder)
        for name in lacks[holder].split():
            vars(module).pop(name, None)
    import signal

    # An enumeration has no public way to take members out.
    names, members = signal.Signals._member_names_, signal.Signals._member_map_
    for name in set(lacks["signal"].split()) & set(members):
        member = members.pop(name)
        if name in names:  # else it is a second name of another
            names.remove(name)
            del signal.Signals._value2member_map_[member.value]
    block(frozenset(lacks["modules"].split()))
    for name in [loaded for loaded in sys.modules if loaded.partition(".")[0] in BELOW]:
        del sys.modules[name]
    sys.platform = system


def apart(function, *args):
    """Run a function in a fork, which may spoil what it likes, and return what it returns."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            result = {"value": function(*args)}
        except BaseException:
            result = {"error": traceback.format_exc()}
        with open(writing, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    result = json.loads(text)
    assert "error" not in result, result["error"]
    return result["value"]


def unimportable() -> list[str]:
    """Import everything, and return what cannot be imported."""
    failed = []
    for name in MODULES:
        try:
            import_module(name)
        except Exception as error:  # noqa: PERF203 - each is reported
            failed.append(f"{name}: {type(error).__name__}: {error}")
    return failed


def accel(*tokens: str) -> str:
    """Run a command, and return what it printed and its exit code."""
    from accel_launch.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = main(tokens)
        except SystemExit as end:
            code = end.code
    return f"{printed.getvalue()}exit code {code}"


def raised(function, *args, **kwargs) -> str:
    """Return the error of a call."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def train(folder: str) -> list[str]:
    """Train on one process with what accel has for it, and return what does not fit."""
    import torch
    from safetensors.torch import load_file
    from torch.utils.data import DataLoader

    from accel import Accelerator
    from accel_ckpt.sharded.merge import merge_fsdp_weights
    from accel_ckpt.sharded.save_load import save_sharded_state
    from accel_ops.memory import peak_memory

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=folder, gradient_accumulation_steps=2)
    accelerator.init_trackers("run", config={"lr": 0.1})
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.arange(32.0).reshape(8, 4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 2, shuffle=True))
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log({"loss": loss.item()})
        accelerator.save_on_preemption(f"{folder}/preempted")
    before = model.weight.detach().clone()
    accelerator.save_state(f"{folder}/state", blocking=False)
    accelerator.wait_for_save()
    torch.nn.init.zeros_(model.weight)
    accelerator.load_state(f"{folder}/state")
    save_sharded_state(f"{folder}/parts", [model])
    merged = load_file(merge_fsdp_weights(f"{folder}/parts", f"{folder}/merged"))
    accelerator.end_training()
    wrong = [] if torch.equal(before, model.weight) else ["load_state did not bring the weights back"]
    if not torch.equal(before, merged["weight"]):
        wrong.append("the merged weights are not those that were saved")
    if peak_memory()["device"] < 0:
        wrong.append("peak_memory")
    return wrong


def windows(folder: str, script: str) -> dict[str, object]:
    """Do on Windows what works there and what cannot."""
    pretend("win32")
    done: dict[str, object] = {"unimportable": unimportable()}
    from accel import Accelerator, debug_launcher, notebook_launcher
    from accel.utils import get_max_memory

    done |= {
        "launch": accel("launch", "--cpu", script),
        "launch two": accel("launch", "--cpu", "--num_processes", "2", script),
        "dry run": accel("launch", "--cpu", "--dry_run", script),
        "test": accel("test", "--cpu"),
        "notebook": raised(notebook_launcher, print, num_processes=2),
        "debug": raised(debug_launcher, print),
        "help": accel("--help"),
        "explain": accel("launch", "--cpu", "--explain", script),
        "config": accel("config", "default", "--config_file", f"{folder}/config.yaml"),
        "env": accel("env", "--config_file", f"{folder}/config.yaml"),
        "notebook alone": notebook_launcher(len, ([1, 2],), num_processes=1),
    }
    done["train"] = train(folder)
    signals = Accelerator(cpu=True).save_on_preemption
    done["memory"] = raised(get_max_memory)
    done["memory given"] = raised(get_max_memory, {"cpu": "1GiB"})
    done["signals"] = raised(signals, f"{folder}/preempted", signals=["SIGUSR1", "SIGHUP"])
    return done


def macos(folder: str, script: str) -> dict[str, object]:
    """Do the same on macOS, which has POSIX's processes and signals."""
    pretend("darwin")
    return {
        "unimportable": unimportable(),
        "launch": accel("launch", "--cpu", "--num_processes", "2", script),
        "train": train(folder),
    }


def test_there_are_modules():
    assert len(MODULES) > 400


def test_windows(world, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    (done,) = world.run(apart, windows, str(tmp_path), str(script), size=1, init=False)
    assert done["unimportable"] == []

    reason = "does not work on Windows: it needs fork, process groups and signals of POSIX."
    for name in ("launch", "launch two", "dry run"):
        assert f"accel launch: error: `accel launch` {reason}" in done[name], done[name]
        assert (
            f"For one process run the script itself, `python {script}`; for several use torchrun."
            in done[name]
        )
        assert done[name].endswith("it works.\nexit code 2")
        assert "trained" not in done[name]
    assert f"accel test: error: `accel launch` {reason}" in done["test"]
    assert f"LaunchError: notebook_launcher with num_processes=2, num_nodes=1 {reason}" in done["notebook"]
    assert f"LaunchError: debug_launcher {reason}" in done["debug"]
    assert "this system (win32) has none of them. Pass some of SIGABRT," in done["signals"]

    for name in ("help", "explain", "config", "env"):
        assert done[name].endswith("exit code 0"), done[name]
    assert done["memory"].startswith(
        "RuntimeError: accel cannot see how much memory is free on Windows. Pass"
    )
    assert done["memory given"] == "no error"
    assert done["notebook alone"] == 2
    assert done["train"] == []


def test_macos(world, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os\nprint('rank', os.environ['RANK'])\n")
    (done,) = world.run(apart, macos, str(tmp_path), str(script), size=1, init=False)
    assert done["unimportable"] == []
    assert done["launch"].endswith("exit code 0"), done["launch"]
    assert done["train"] == []
