"""Start on several machines with DeepSpeed's own launcher, which reaches them by pdsh, MPI or Slurm.

On one machine, and with the launcher named standard, DeepSpeed's workers are started like any others.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accel_launch.errors import LaunchError
from accel_launch.launchers.hostfile import Host, read_hostfile
from accel_launch.local.ports import DEFAULT_PORT
from accel_launch.plan.plan import LauncherCommand
from accel_launch.settings.resolve import Settings
from accel_launch.settings.schema import nearest
from accel_state import env

if TYPE_CHECKING:
    from accel_launch.plan.plan import LaunchPlan

_HOSTFILE = "/job/hostfile"  # DeepSpeed's default


def is_needed(settings: Settings) -> bool:
    """Return whether a run is to be started by DeepSpeed's launcher.

    Args:
        settings: The effective settings.
    """
    requested_launcher = settings.value("deepspeed_multinode_launcher")
    if (
        not settings.value("use_deepspeed")
        or settings.value("launcher") != "auto"
        or requested_launcher == "standard"
    ):
        return False
    is_multinode = bool(settings.value("num_machines") != 1)
    return (is_multinode and bool(requested_launcher)) or _hostfile(settings) is not None


def _hostfile(settings: Settings) -> str | None:
    provided: str | None = settings.value("deepspeed_hostfile")
    found = settings.value("num_machines") != 1 and Path(_HOSTFILE).is_file()
    return provided or (_HOSTFILE if found else None)


def prepare(plan: LaunchPlan, base: Mapping[str, str]) -> LauncherCommand:
    """Return the command of DeepSpeed's launcher.

    Args:
        plan: What to start.
        base: This process's environment.

    Raises:
        LaunchError: If there is no hostfile, it has a typo, or a filter names what it does not have.
    """
    value = plan.settings.value
    launcher = value("deepspeed_multinode_launcher") or "pdsh"
    hostfile = _hostfile(plan.settings)
    if hostfile is None:
        raise LaunchError(
            f"deepspeed_multinode_launcher={launcher} needs a hostfile: give --deepspeed_hostfile FILE with "
            "a line per machine, NAME slots=4; or --deepspeed_multinode_launcher standard, and the same "
            "command on each machine."
        )
    hosts = _read(hostfile)
    # accel reads LOCAL_RANK; the flag --local_rank would be unknown to most scripts.
    command = ["deepspeed", "--no_local_rank", f"--hostfile={hostfile}", *_resource_flags(plan, hosts)]
    command += [f"--master_port={value('main_process_port') or DEFAULT_PORT}"]
    if value("main_process_ip") is not None:
        command.append(f"--master_addr={value('main_process_ip')}")
    note = f"DeepSpeed's launcher ({launcher}) for the machines of {hostfile}"
    if launcher == "nossh":  # one such command on each machine
        command += ["--no_ssh", f"--node_rank={value('machine_rank')}"]
        flags = [f"--{name}" for name in ("module", "no_python") if value(name)]
        return LauncherCommand(
            [*command, *flags, plan.script, *plan.arguments], plan.environ, note, wait=_check_program
        )
    # What it runs on other machines does not have this environment.
    changed = _portable({name: text for name, text in plan.environ.items() if base.get(name) != text})
    # env sets the variables there; --no_python keeps DeepSpeed from putting python before it.
    command += [f"--launcher={launcher}", "--no_python", "env", *changed, *plan.command]
    return LauncherCommand(command, plan.environ, note, wait=_check_program)


def _read(hostfile: str) -> list[Host]:
    hosts = read_hostfile(hostfile)
    names = [host.name for host in hosts]
    for host in hosts:
        if host.slots is None:
            raise LaunchError(
                f"The hostfile {hostfile} gives {host.name} no slots. Write {host.name} slots=4."
            )
        if names.count(host.name) > 1:
            raise LaunchError(f"The hostfile {hostfile} names {host.name} twice. Give it one line.")
    return hosts


def _resource_flags(plan: LaunchPlan, hosts: list[Host]) -> list[str]:
    """Return the flags that choose machines and devices."""
    value = plan.settings.value
    filters = {
        "--include": value("deepspeed_inclusion_filter"),
        "--exclude": value("deepspeed_exclusion_filter"),
    }
    provided = [f"{flag}={text}" for flag, text in filters.items() if text]
    if len(provided) == 2:
        raise LaunchError(
            "--deepspeed_inclusion_filter and --deepspeed_exclusion_filter exclude each other; choose one."
        )
    for text in filter(None, filters.values()):
        _check_filter(text, hosts)
    if provided:
        return provided
    machines = plan.machines[1] if plan.settings.is_set("num_machines") else len(hosts)
    if machines > len(hosts):
        raise LaunchError(f"num_machines={machines}, but the hostfile has {len(hosts)} machines.")
    flags = [f"--num_nodes={machines}"]
    if plan.settings.is_set("num_processes"):
        flags.append(f"--num_gpus={_per_machine(plan, hosts[:machines])}")
    return flags


def _per_machine(plan: LaunchPlan, hosts: list[Host]) -> int:
    total = plan.settings.value("num_processes")
    # --num_gpus is one number for all machines.
    here, rest = divmod(total, len(hosts))
    fewest = min(hosts, key=lambda host: host.slots or 0)
    if rest or here > (fewest.slots or 0):
        raise LaunchError(
            f"num_processes={total} over {len(hosts)} machines is {total / len(hosts):g} each, but "
            f"{fewest.name} has {fewest.slots} slots. Give a multiple of {len(hosts)} that fits, or nothing."
        )
    return int(here)


def _check_filter(text: str, hosts: list[Host]) -> None:
    """Check NAME[:SLOT,...][@NAME...]."""
    slots = {host.name: host.slots or 0 for host in hosts}
    for entry in text.split("@"):
        name, colon, chosen = entry.partition(":")
        if name not in slots:
            raise LaunchError(
                f"The filter {text!r} names {name!r}, which is not in the hostfile.{nearest(name, slots)} A "
                "filter is NAME:SLOT,SLOT@NAME."
            )
        wrong = [slot for slot in chosen.split(",") if not (slot.isdecimal() and int(slot) < slots[name])]
        if colon and wrong:
            raise LaunchError(
                f"The filter {text!r} asks for slot {wrong[0]!r} of {name}, which has 0 to {slots[name] - 1}."
            )


def _portable(changed: Mapping[str, str]) -> list[str]:
    """Return NAME=value words that survive the shells on the way, with a warning for those that do not."""
    return [line.rstrip("\n") for line in env.convert_dict_to_env_variables(dict(sorted(changed.items())))]


def _check_program() -> None:
    import shutil

    if shutil.which("deepspeed") is None:
        raise LaunchError(
            "There is no program `deepspeed` on the PATH. Install it with `pip install deepspeed`."
        )
