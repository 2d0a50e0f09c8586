"""A program with the switch on, without torch: accelerate is accel, seen from another name."""

import copyreg
import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import inspect
import io
import logging
import pickle
import pkgutil
import sys
from pathlib import Path
from unittest import mock

import accelerate
import accelerate.commands.config
import accelerate.utils.dataclasses
import accelerate.utils.imports
from accelerate import DistributedType, ProfileKwargs

import accel
import accel.utils.dataclasses
from accel.drop_in import INTERFACE_VERSION
from accel_state.logging.loggers import MultiProcessAdapter

# Not `import checks`: the folder of the program is all that is on the path.
sys.path.insert(0, str(Path(__file__).parent))
import checks

FOLDER = Path(sys.argv[1])


def error_of(statement: str) -> ImportError:
    try:
        exec(statement)
    except ImportError as error:
        return error
    raise AssertionError(f"{statement} did not fail")


def check_modules_and_classes_are_the_same_objects():
    assert accelerate.utils.dataclasses is accel.utils.dataclasses
    assert sys.modules["accelerate.commands.config"] is sys.modules["accel.commands.config"]
    assert accelerate.DistributedType is DistributedType is accel.DistributedType
    assert isinstance(accel.ProfileKwargs(), ProfileKwargs)
    assert accel.utils.dataclasses.__spec__.name == accel.utils.dataclasses.__name__


def check_the_other_package_is_not_imported():
    assert accelerate.__file__ == accel.__file__
    assert importlib.util.find_spec("accelerate.only_there") is None


def check_repr_and_tracebacks_name_accel():
    assert repr(accelerate) == repr(accel)
    assert repr(accelerate.utils.dataclasses).startswith("<module 'accel.utils.dataclasses' from")
    assert repr(ProfileKwargs).startswith("<class 'accel_")
    assert accelerate.__name__ == "accel"


def check_versions():
    assert accelerate.__version__ == INTERFACE_VERSION != accel.__version__
    assert importlib.metadata.version("accelerate") == INTERFACE_VERSION
    assert importlib.metadata.version("Accelerate") == INTERFACE_VERSION
    assert importlib.metadata.version("accel") == accel.__version__


def check_metadata():
    found = importlib.metadata.distribution("accelerate")
    assert (found.metadata["Name"], found.version) == ("accelerate", INTERFACE_VERSION)
    assert "huggingface" in found.metadata["Home-page"]  # sentence-transformers asks before it trains
    # Accel's, and the other package's, which is installed next to it.
    assert importlib.metadata.packages_distributions()["accelerate"] == ["accelerate", "accelerate"]
    # The first of a name counts; the other package's comes later.
    assert next(iter(importlib.metadata.distributions(name="accelerate"))).version == INTERFACE_VERSION


def check_entry_points_load():
    points = importlib.metadata.entry_points(group="console_scripts")
    ours = {point.name: point.load() for point in points if point.value.startswith("accelerate.")}
    assert set(ours) == {
        "accelerate",
        "accelerate-config",
        "accelerate-estimate-memory",
        "accelerate-launch",
        "accelerate-merge-weights",
    }
    assert ours["accelerate"].__module__ == "accel_launch.cli"


def check_specs():
    assert importlib.util.find_spec("accelerate").origin == accel.__file__
    assert importlib.util.find_spec("accelerate").submodule_search_locations == accel.__path__
    assert importlib.util.find_spec("accelerate.utils.modeling").origin.endswith("accel/utils/modeling.py")
    assert "accelerate.utils.modeling" not in sys.modules
    assert importlib.util.find_spec("accelerate.nothing") is None


def check_files_of_the_package():
    assert (importlib.resources.files("accelerate") / "py.typed").is_file()
    found = {module.name for module in pkgutil.iter_modules(accelerate.__path__, "accelerate.")}
    assert {"accelerate.utils", "accelerate.hooks"} <= found


def check_a_missing_name():
    for place in ("accelerate", "accelerate.utils", "accelerate.utils.dataclasses"):
        error = error_of(f"from {place} import Nothing")
        assert type(error) is ImportError
        assert (
            f"cannot import name 'Nothing' from {place!r}: {place.replace('erate', '')} has no Noth"
            in str(error)
        )
        assert "ask for it" in str(error)
        assert INTERFACE_VERSION in str(error)
        assert not hasattr(sys.modules[place], "Nothing")


def check_a_missing_module():
    for place in ("accelerate.nothing", "accelerate.utils.nothing", "accelerate.only_there"):
        error = error_of(f"import {place}")
        assert type(error) is ModuleNotFoundError
        assert error.name == place
        assert f"there is no {place.replace('erate', '')}" in str(error)
        assert "ask for it" in str(error)


def check_names_are_set_in_accel():
    with mock.patch("accelerate.is_rich_available", "other"):
        assert accel.is_rich_available == "other"
    assert callable(accel.is_rich_available)
    assert accelerate.is_rich_available is accel.is_rich_available
    accelerate.added = 1
    assert accel.added == 1
    del accelerate.added
    assert not hasattr(accel, "added")
    assert set(accel.__all__) < set(dir(accelerate))


def check_everything_can_be_imported_at_once():
    names = {}
    exec("from accelerate.utils.dataclasses import *", names)
    assert names["DistributedType"] is DistributedType
    assert set(accelerate.__all__) == set(accel.__all__)


def check_a_function_keeps_its_place_beside_the_module_of_its_name():
    import accelerate.utils.tqdm
    from accelerate.utils.tqdm import tqdm

    assert accelerate.utils.tqdm is accel.utils.tqdm is tqdm
    assert inspect.isfunction(tqdm)
    assert sys.modules["accelerate.utils.tqdm"] is sys.modules["accel.utils.tqdm"]


def check_reloading():
    before = accelerate
    assert importlib.reload(accelerate) is before
    assert (accelerate.__name__, accel.__name__) == ("accel", "accel")
    assert importlib.reload(accelerate.utils.imports) is accel.utils.imports
    assert sys.modules["accelerate.utils.imports"] is sys.modules["accel.utils.imports"]


def check_inspect():
    assert inspect.getmodule(ProfileKwargs).__name__.startswith("accel_state.")
    assert inspect.getsource(accelerate) == Path(accel.__file__).read_text()
    assert (
        inspect.getsource(accelerate.utils.dataclasses) == Path(accel.utils.dataclasses.__file__).read_text()
    )
    assert inspect.ismodule(accelerate)


def check_pickles_of_the_other_name_load():
    # Protocol 0 names a class as text: this is what the other package writes.
    assert pickle.loads(b"caccelerate.utils.dataclasses\nDistributedType\n.") is DistributedType
    assert pickle.loads(b"caccelerate\nProfileKwargs\n.") is ProfileKwargs
    # Its plugins and settings name the one module that it defines them in.
    settings = [name for name in dir(accelerate.utils) if name.endswith(("Kwargs", "Plugin"))]
    assert len(settings) >= 15
    for name in settings:
        found = pickle.loads(f"caccelerate.utils.dataclasses\n{name}\n.".encode())
        assert found is getattr(accelerate.utils, name)
    given = pickle.loads((FOLDER / "given.pkl").read_bytes())
    assert given == ProfileKwargs(with_flops=True)
    (FOLDER / "made.pkl").write_bytes(pickle.dumps(accelerate.ProfileKwargs(with_stack=True)))


def check_the_top_module_can_be_pickled():
    # As cloudpickle and dill do for functions that use it.
    assert pickle.loads(pickle.dumps(accelerate)) is accelerate


def check_every_module_can_be_walked_to():
    names = [
        module.name
        for module in pkgutil.walk_packages(accelerate.__path__, "accelerate.")
        if module.name.partition(".")[2].count(".") < 2 and not module.name.endswith("__main__")
    ]
    assert len(names) > 60
    for name in names:
        if importlib.util.find_spec(name.replace("accelerate", "accel", 1)).loader is not None:
            assert importlib.util.find_spec(name) is not None, name


def check_a_new_import_after_the_first_is_forgotten():
    class_before, modules = DistributedType, dict(sys.modules)
    for name in [name for name in modules if name.partition(".")[0] == "accelerate"]:
        del sys.modules[name]
    again = importlib.import_module("accelerate.utils.dataclasses")
    assert again is accel.utils.dataclasses
    assert importlib.import_module("accelerate").DistributedType is class_before
    sys.modules.update(modules)


def check_copyreg():
    with mock.patch.dict(copyreg.dispatch_table):
        copyreg.pickle(accelerate.ProfileKwargs, lambda value: (dict, ()))
        assert pickle.loads(pickle.dumps(accel.ProfileKwargs())) == {}


def heard(logger, level):
    """What a logger passes on to handlers of "accelerate"."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logging.getLogger("accelerate").addHandler(handler)
    logger.log(level, "heard")
    logging.getLogger("accelerate").removeHandler(handler)
    return text.getvalue()


def check_logging():
    logger, theirs = logging.getLogger("accel_ckpt.weights.load"), logging.getLogger("accelerate")
    assert heard(logger, logging.DEBUG) == ""
    theirs.setLevel(logging.DEBUG)
    assert heard(logger, logging.DEBUG) == "heard\n"
    theirs.setLevel(logging.ERROR)
    assert not logging.getLogger("accel.big_models").isEnabledFor(logging.WARNING)
    assert heard(logger, logging.WARNING) == ""
    theirs.setLevel(logging.NOTSET)
    assert isinstance(importlib.import_module("accelerate.logging").get_logger("x"), MultiProcessAdapter)


def check_loggers_of_modules():
    modules = {
        "accelerate.utils.modeling": ("accel_ckpt.weights.load", "accel.big_models.placement.memory"),
        "accelerate.utils.other": ("accel_ckpt.files.tensors",),
        "accelerate.utils": ("accel_ckpt.weights.load", "accel_ckpt.files.tensors"),
        "accelerate.accelerator": ("accel.training.arguments", "accel.engines"),
    }
    for theirs, ours in modules.items():
        for name in ours:
            logging.getLogger(theirs).setLevel(logging.DEBUG)
            assert heard(logging.getLogger(name), logging.DEBUG) == "heard\n", (theirs, name)
            logging.getLogger(theirs).setLevel(logging.ERROR)
            assert heard(logging.getLogger(name), logging.WARNING) == "", (theirs, name)
        logging.getLogger(theirs).setLevel(logging.NOTSET)
    assert heard(logging.getLogger("accel_ckpt.files.tensors"), logging.WARNING) == "heard\n"


def check_levels_of_accel_s_own_loggers_hold_too():
    for package, name in (("accel_ckpt", "accel_ckpt.files.tensors"), ("accel", "accel.training.arguments")):
        logging.getLogger(package).setLevel(logging.DEBUG)
        assert heard(logging.getLogger(name), logging.DEBUG) == "heard\n"
        logging.getLogger(package).setLevel(logging.NOTSET)
        assert heard(logging.getLogger(name), logging.DEBUG) == ""


if __name__ == "__main__":
    checks.run(globals())
