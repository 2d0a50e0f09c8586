"""The import system's view of accelerate: each of its modules is the module of accel with the same path."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import accumulate
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from accel.drop_in.interface import INTERFACE_VERSION

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder

_NAME = "accelerate"
# The logger of accelerate above that of each package: the functions of three are documented in its utils.
_PACKAGES = {
    "accel": "accelerate",
    "accel_ckpt": "accelerate.utils",
    "accel_data": "accelerate",
    "accel_launch": "accelerate",
    "accel_ops": "accelerate.utils",
    "accel_optim": "accelerate",
    "accel_state": "accelerate.utils",
}
# The loggers of accel that write what the functions of a documented module log.
_LOGGERS = {
    "accelerate.accelerator": ("accel.engines", "accel.training.arguments"),
    "accelerate.utils.environment": ("accel_state.devices.affinity",),
    "accelerate.utils.modeling": ("accel_ckpt.weights.load", "accel.big_models.placement.memory"),
    "accelerate.utils.other": ("accel_ckpt.files.tensors",),
}
_ASK = (
    "accel stands for accelerate here (accel.drop_in), with the documented interface of "
    f'{INTERFACE_VERSION}. If a program needs this name, ask for it: see "Questions and requests" in the '
    "README of accel."
)


def install() -> None:
    """Put accel in place of accelerate, in this process alone.

    Raises:
        RuntimeError: If accelerate itself has been imported already.
    """
    other = sys.modules.get(_NAME)
    if other is not None:
        raise RuntimeError(
            f"accelerate has been imported already, from {getattr(other, '__file__', None)}; accel can no "
            "longer take its place. Call accel.drop_in.activate() before anything imports accelerate "
            "(transformers, peft, trl and diffusers do), or start the program with `python -m accel.drop_in`."
        )
    # First, so that an installed accelerate is not found.
    sys.meta_path.insert(0, AccelFinder())
    _join_loggers()


def is_active() -> bool:
    """Return whether `import accelerate` gives accel in this process."""
    return any(isinstance(finder, AccelFinder) for finder in sys.meta_path)


def _join_loggers() -> None:
    """Apply the levels and handlers of accelerate's loggers to what accel logs too."""
    # Only these loggers have the root as their parent; logging sets a parent when it makes a logger, and then
    # leaves it unless a logger between the two is made.
    for package, documented in _PACKAGES.items():
        logging.getLogger(package).parent = logging.getLogger(documented)
    for documented, names in _LOGGERS.items():
        for name in names:
            # Made now, as a logger that is made later takes the place of its children's parent.
            for package in accumulate(name.split(".")[:-1], "{}.{}".format):
                logging.getLogger(package)
        between = logging.getLogger(documented)
        # A logger has one parent: what stands above the second name's logger is left to "accelerate".
        between.parent = logging.getLogger(names[0].rpartition(".")[0])
        for name in names:
            logging.getLogger(name).parent = between


class AccelFinder(MetaPathFinder):
    """Finds accelerate and its modules, and what `importlib.metadata` asks of the package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find accelerate or one of its modules, and nothing else.

        Args:
            fullname: The module's name.
            path: Not used: accel's modules are found by their names.
            target: Not used.

        Raises:
            ModuleNotFoundError: If a program imports a module that accel does not have.
        """
        if fullname.partition(".")[0] != _NAME:
            return None
        name = fullname.replace(_NAME, "accel", 1)
        found = find_spec(name)
        if found is None:
            # None for those who only ask, as importlib.util.find_spec does. An import comes from this
            # function of Python's; in a Python that calls it otherwise, the error is Python's own.
            if sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
                raise ModuleNotFoundError(
                    f"No module named {fullname!r}: there is no {name}. {_ASK}", name=fullname
                )
            return None
        spec = ModuleSpec(fullname, AccelLoader(found), origin=found.origin)
        spec.has_location = found.has_location
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """Find the package accelerate.

        Args:
            context: What is looked for; its name is None for every package.
        """
        # Here, as importlib.metadata takes longer to import than all the rest.
        from accel.drop_in.metadata import AccelDistribution

        wanted = context.name is None or context.name.lower() == _NAME
        return [AccelDistribution()] if wanted else []


class AccelLoader(InspectLoader):
    """Loads a module of accelerate: it is the very module of accel.

    Args:
        spec: The spec of accel's module.
    """

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Make the top module; for the others an empty one, which accel's replaces.

        Args:
            spec: The spec of accelerate's module.
        """
        return Accelerate() if spec.name == _NAME else None

    def exec_module(self, module: ModuleType) -> None:
        """Import the module of accel, and have it found under the other name.

        Args:
            module: What `create_module` made.
        """
        real = import_module(self._spec.name)
        if isinstance(module, Accelerate):
            module.__name__ = real.__name__  # importlib.reload changes it
            return
        # The import system takes what stands here then. Were it returned by create_module instead, its
        # __spec__ would become that of accelerate's module.
        sys.modules[module.__name__] = real
        vars(real)["__getattr__"] = _explaining(real, vars(real).get("__getattr__"))
        # A function of a package may have the name of a module in it, as accel.utils.tqdm has. An import of
        # that module by the other name would put it in the function's place, were it not there already.
        for name, loaded in list(sys.modules.items()):
            package, _, child = name.rpartition(".")
            if package == real.__name__ and vars(real).get(child, loaded) is not loaded:
                sys.modules[f"{module.__name__}.{child}"] = loaded

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the module's code, with which `python -m` runs it.

        Args:
            fullname: The name of accelerate's module.
        """
        code: CodeType | None = self._loader.get_code(self._spec.name)
        return code

    def get_source(self, fullname: str) -> str | None:
        """Return the module's source.

        Args:
            fullname: The name of accelerate's module.
        """
        source: str | None = self._loader.get_source(self._spec.name)
        return source

    def get_resource_reader(self, fullname: str) -> Any:
        """Return what `importlib.resources` reads the package's files with.

        Args:
            fullname: The name of accelerate's module.
        """
        return self._loader.get_resource_reader(self._spec.name)

    @property
    def _loader(self) -> Any:
        return self._spec.loader


class Accelerate(ModuleType):
    """The module accelerate: a view of accel's top module, whose `__version__` alone is another.

    Reading, setting and deleting a name does so in accel.
    """

    _accel: ModuleType

    def __init__(self) -> None:
        real = import_module("accel")
        super().__init__(real.__name__, real.__doc__)
        super().__setattr__("_accel", real)
        self.__version__ = INTERFACE_VERSION

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._accel, name)
        except AttributeError:
            if _is_import_from(sys._getframe(1)):
                raise _missing("accel", name) from None
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        # What the import system sets belongs to the view: __spec__, __loader__, __path__ ...
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(self._accel, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._accel, name)

    def __dir__(self) -> list[str]:
        return dir(self._accel)

    def __repr__(self) -> str:
        return repr(self._accel)

    def __reduce__(self) -> tuple[Callable[[], ModuleType], tuple[()]]:
        # For cloudpickle and dill, which pickle a module by its name: they know no other classes of modules.
        return _view, ()


def _view() -> ModuleType:
    """Return the module that a pickled view of accel stands for: accel itself where the switch is off."""
    return import_module(_NAME if is_active() else "accel")


def _explaining(module: ModuleType, original: Callable[[str], Any] | None) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module: it has `from accelerate.x import name` say where to ask."""

    def get(name: str) -> Any:
        try:
            if original is not None:
                return original(name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        except AttributeError:
            if _is_import_from(sys._getframe(1)):
                raise _missing(module.__name__, name) from None
            raise

    return get


def _missing(module: str, name: str) -> ImportError:
    requested = module.replace("accel", _NAME, 1)
    return ImportError(
        f"cannot import name {name!r} from {requested!r}: {module} has no {name}. {_ASK}", name=requested
    )


def _is_import_from(frame: Any) -> bool:
    """Return whether a frame is at the part of `from module import name` that looks up the name.

    An AttributeError would be replaced there by an ImportError of Python's own; elsewhere (hasattr, getattr
    with a default) it must be one.
    """
    from dis import opmap

    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"] if frame.f_lasti >= 0 else False
