"""Write config files by commands, or see what the scripts of others' config files are started with.

    configs.py FOLDER write CONFIG ...
    configs.py FOLDER launch CONFIG ...

`write` makes the default config, brings each CONFIG up to date, and rewrites it for version 2 of FSDP where
it is for version 1.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.accelerate_cli import main as run_command

PROBE = """\
import json, os, sys
if os.environ.get("RANK", "0") == "0":
    json.dump(dict(os.environ), open(sys.argv[1], "w"))
"""


def command(*arguments: str) -> int:
    """Run a command of accelerate's in a child of this process, which need not import anything again."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        sys.argv[1:] = arguments
        code: Any = 1
        try:
            code = run_command()
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code if isinstance(code, int) else int(code is not None))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def write(folder: Path, configs: list[Path]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, options in {"default": [], "half": ["--mixed_precision", "bf16"]}.items():
        command("config", "default", "--config_file", str(folder / f"{name}.yaml"), *options)
        results[name] = yaml.safe_load((folder / f"{name}.yaml").read_text())
    for config in configs:
        copy = folder / config.name
        shutil.copy(config, copy)
        command("config", "update", "--config_file", str(copy))
        results[f"{config.stem} updated"] = yaml.safe_load(copy.read_text())
        target = folder / f"second_{config.name}"
        command("to-fsdp2", "--config_file", str(config), "--output_file", str(target))
        results[f"{config.stem} to fsdp2"] = yaml.safe_load(target.read_text()) if target.exists() else None
    return results


def launch(folder: Path, configs: list[Path]) -> dict[str, Any]:
    (folder / "probe.py").write_text(PROBE)
    results: dict[str, Any] = {}
    for config in configs:
        told = folder / f"{config.stem}.json"
        command("launch", "--config_file", str(config), str(folder / "probe.py"), str(told))
        found = json.loads(told.read_text()) if told.exists() else {}
        results[config.stem] = {
            key: value for key, value in sorted(found.items()) if os.environ.get(key) != value
        }
    return results


def main() -> None:
    folder, mode, *configs = sys.argv[1:]
    make = {"write": write, "launch": launch}[mode]
    results = make(Path(folder), [Path(config) for config in configs])
    (Path(folder) / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
