"""The folders of offloaded weights that are in use, so that no other model's weights replace theirs."""

from __future__ import annotations

import gc
import os
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol
from weakref import WeakValueDictionary

from accel_ckpt.files.safetensors_header import shortened


class _Reader(Protocol):
    """Weights of a folder that are read when they are used, as of OffloadedWeightsLoader."""

    @property
    def save_folder(self) -> Any: ...

    @property
    def index(self) -> Mapping[str, Mapping[str, Any]]: ...


# By id, as mappings cannot be hashed.
_readers: WeakValueDictionary[int, Any] = WeakValueDictionary()


def register_open_folder(reader: _Reader) -> None:
    """Remember who reads weights of a folder, for as long as it is there.

    Args:
        reader: It.
    """
    _readers[id(reader)] = reader


def open_folders_of(model: Any) -> set[int]:
    """Return the ids of the readers that a model's hooks have.

    Args:
        model: A torch.nn.Module.
    """
    found: set[int] = set()
    for module in model.modules():
        hook: Any = vars(module).get("_hf_hook")
        # By what a hook has: its class, and that of several as one, are in a package above this one.
        for part in getattr(hook, "hooks", (hook,)):
            found.update(map(id, _inside(getattr(part, "weights_map", None))))
    return found


def check_not_in_use(
    folder: str | os.PathLike[str], names: Collection[str], own: Collection[int] = ()
) -> None:
    """Check that weights that are to be written replace none that another model still reads.

    Args:
        folder: The folder.
        names: Names of the weights.
        own: Ids of readers that do not count: those of the model whose weights are written.

    Raises:
        ValueError: If they do; it names the folder.
    """
    if not _replaced(folder, names, own):
        return
    # A model that nobody has any more may wait for the collector.
    gc.collect()
    replaced = _replaced(folder, names, own)
    if replaced:
        raise ValueError(
            f"{folder} has weights of a model that is in use, which would compute with others once "
            f"{shortened(sorted(replaced))} are replaced. Give each model a folder of its own, or delete "
            "that model, or remove its hooks (accel.hooks.remove_hook_from_submodules), before the folder is "
            "written again."
        )


def _replaced(folder: str | os.PathLike[str], names: Collection[str], own: Collection[int]) -> set[str]:
    root, found = os.path.realpath(folder), set[str]()
    for reader in list(_readers.values()):
        if id(reader) in own or reader.save_folder is None or os.path.realpath(reader.save_folder) != root:
            continue
        for name, entry in reader.index.items():
            written = str(entry.get("weight_name", name))
            if written in names and "safetensors_file" not in entry:
                found.add(written)
    return found


def _inside(weights: Any) -> Iterator[Any]:
    """Yield a mapping of weights and those that it is made of."""
    while weights is not None:
        yield weights
        if isinstance(weights, ChainMap):
            for part in weights.maps:
                yield from _inside(part)
        weights = getattr(weights, "dataset", None)  # what PrefixedDataset looks names up in
