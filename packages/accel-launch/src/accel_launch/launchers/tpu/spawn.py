"""Run a function of a script in one process per TPU device, through torch_xla.

`python -m accel_launch.launchers.tpu.spawn FUNCTION (one|all) (file|module) SCRIPT [arguments]`. Every
process imports the script under its own name, so that code under `if __name__ == "__main__":` does not run,
and calls the function.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from accel_launch.errors import LaunchError
from accel_launch.settings.schema import nearest
from accel_state.imports.packages import install_hint


@dataclass(frozen=True)
class Call:
    """A function of a script, found again in each process.

    Args:
        function: Its name.
        kind: file or module.
        script: The file, or the module's name.
        arguments: The script's arguments, which the function sees in sys.argv.
    """

    function: str
    kind: str
    script: str
    arguments: tuple[str, ...]

    def find(self) -> Callable[[], object]:
        """Import the script and return the function.

        Raises:
            LaunchError: If the script does not have it.
        """
        sys.argv = [self.script, *self.arguments]
        module = _import_file(self.script) if self.kind == "file" else importlib.import_module(self.script)
        function = getattr(module, self.function, None)
        if callable(function):
            found: Callable[[], object] = function
            return found
        names = [name for name, member in vars(module).items() if callable(member)]
        raise LaunchError(
            f"The script {self.script!r} has no function {self.function!r}.{nearest(self.function, names)} "
            "Name the one that each process is to run with --main_training_function."
        )

    def __call__(self, index: int) -> None:
        """Run the function in one process.

        Args:
            index: The process's place on this host; torch_xla knows it by itself.
        """
        self.find()()


def _import_file(script: str) -> ModuleType:
    # As `python script.py` does, so that modules next to the script are found.
    sys.path.insert(0, str(Path(script).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(script).stem, script)
    if spec is None or spec.loader is None:
        raise LaunchError(f"The script {script!r} cannot be imported; --tpu needs a file that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    # Before it is executed, as import does: pickle and dataclasses look the module up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main(argv: list[str]) -> int:
    """Spawn the processes and wait for them.

    Args:
        argv: The function, one or all devices, file or module, the script and its arguments.

    Returns:
        The exit code.
    """
    function, count, kind, script, *arguments = argv
    call = Call(function, kind, script, tuple(arguments))
    try:
        xmp = importlib.import_module("torch_xla.distributed.xla_multiprocessing")
    except ImportError as error:
        print(
            f"accel launch: error: --tpu needs torch_xla: {error}. Install the one for your torch: "
            f"{install_hint('tpu', 'accel-launch')}.",
            file=sys.stderr,
        )
        return 2
    try:
        # Tried here once: an error in each of eight processes would be hard to read.
        call.find()
    except LaunchError as error:
        print(f"accel launch: error: {error}", file=sys.stderr)
        return 2
    xmp.spawn(call, nprocs=1 if count == "one" else None)  # the only numbers that it takes
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
