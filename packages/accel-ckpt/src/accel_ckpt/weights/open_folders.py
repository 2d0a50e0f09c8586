"""The folders of offloaded weights that are in use, so that weights of another model do not replace them."""

from __future__ import annotations

import gc
import os
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol
from weakref import WeakValueDictionary

from accel_ckpt.files.safetensors_header import shortened


class _OpenFolder(Protocol):
    """Weights of a folder that are read when used, such as OffloadedWeightsLoader."""

    @property
    def save_folder(self) -> Any: ...

    @property
    def index(self) -> Mapping[str, Mapping[str, Any]]: ...


# By id, as mappings cannot be hashed.
_open_folders: WeakValueDictionary[int, Any] = WeakValueDictionary()


def register_open_folder(reader: _OpenFolder) -> None:
    """Register a reader of a folder's weights, as long as it exists.

    Args:
        reader: The reader.
    """
    _open_folders[id(reader)] = reader


def open_folders_of(model: Any) -> set[int]:
    """Return the ids of the registered readers that a model's hooks use.

    Args:
        model: A torch.nn.Module.
    """
    readers: set[int] = set()
    for module in model.modules():
        hook: Any = vars(module).get("_hf_hook")
        # By attribute: the classes of hooks are in a package above this one.
        for item in getattr(hook, "hooks", (hook,)):
            readers.update(map(id, _nested(getattr(item, "weights_map", None))))
    return readers


def check_not_in_use(
    folder: str | os.PathLike[str], names: Collection[str], ignored: Collection[int] = ()
) -> None:
    """Check that writing weights replaces none that another model still reads.

    Args:
        folder: The folder.
        names: Names of the weights.
        ignored: Ids of readers to ignore: those of the model whose weights are written.

    Raises:
        ValueError: If it does; it names the folder.
    """
    if not _replaced(folder, names, ignored):
        return
    # An unreferenced model may not be collected yet.
    gc.collect()
    replaced = _replaced(folder, names, ignored)
    if replaced:
        raise ValueError(
            f"{folder} has weights of a model that is in use, and would compute with wrong ones once "
            f"{shortened(sorted(replaced))} are replaced. Give each model its own folder, or delete "
            "that model, or remove its hooks (accel.hooks.remove_hook_from_submodules), before the folder is "
            "written again."
        )


def _replaced(folder: str | os.PathLike[str], names: Collection[str], ignored: Collection[int]) -> set[str]:
    root, replaced = os.path.realpath(folder), set[str]()
    for reader in list(_open_folders.values()):
        if (
            id(reader) in ignored
            or reader.save_folder is None
            or os.path.realpath(reader.save_folder) != root
        ):
            continue
        for name, entry in reader.index.items():
            written = str(entry.get("weight_name", name))
            if written in names and "safetensors_file" not in entry:
                replaced.add(written)
    return replaced


def _nested(weights: Any) -> Iterator[Any]:
    """Yield a mapping of weights and the mappings that it consists of."""
    while weights is not None:
        yield weights
        if isinstance(weights, ChainMap):
            for item in weights.maps:
                yield from _nested(item)
        weights = getattr(weights, "dataset", None)  # the mapping of a PrefixedDataset
