"""The wire format of a batch: the bytes of its tensors, and the tree of its structure.

The tree, in which each tensor is replaced by its shape and dtype, is sent pickled, and only if it differs
from that of the previous batch. Leaves that are not plain tensors are part of it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from accel_ops.collectives.pack_sections import as_bytes
from accel_ops.trees.tensors import TensorInformation, is_tensor_information
from accel_ops.trees.walk import children, find_path, keys, recursively_apply

# Immutable leaves, which several batches may share.
_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype)


class Packet(NamedTuple):
    """A batch that is ready to be sent.

    Args:
        structure: The pickled tree; empty if it is that of the previous batch.
        tensors: The bytes of each tensor, shape (nbytes,), dtype uint8.
    """

    structure: bytes
    tensors: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes to send."""
        return len(self.structure) + sum(map(len, self.tensors))


class Packer:
    """Packs the batches for one receiver."""

    def __init__(self) -> None:
        self._sent: bytes | None = None
        self._outline: Any = None  # of the last batch; None if it has none

    def pack(self, batch: Any) -> Packet:
        """Make a packet.

        Args:
            batch: The batch.

        Raises:
            TypeError: If something in it cannot be pickled.
        """
        tensors: list[torch.Tensor] = []
        outline = _outline_of(batch, tensors)
        # The usual case: the structure is unchanged, which is detected without pickling.
        if outline is not None and outline == self._outline:
            return Packet(b"", tensors)
        self._outline = outline
        # The walk above may have stopped in the middle.
        tensors.clear()

        def to_information(tensor: torch.Tensor) -> TensorInformation:
            tensors.append(_as_bytes(tensor))
            return TensorInformation(tensor.shape, tensor.dtype)

        # Tensors are removed from the tree, so that the pickle is small and the same for every step.
        tree = recursively_apply(to_information, batch, test_type=_is_plain)
        try:
            structure = pickle.dumps(tree)
        except Exception as error:
            raise TypeError(_unpicklable(tree, error)) from error
        if structure == self._sent:
            return Packet(b"", tensors)
        self._sent = structure
        return Packet(structure, tensors)

    def reset(self) -> None:
        """Send the structure with the next packet: the last one may not have arrived."""
        self._sent = self._outline = None


class Unpacker:
    """Unpacks batches."""

    def __init__(self) -> None:
        self._tree: Any = None
        self._again = b""  # the pickled tree, if batches cannot share its leaves

    def set_structure(self, structure: bytes) -> None:
        """Set the structure from a packet; an empty one changes nothing."""
        if structure:
            self._tree = pickle.loads(structure)
            self._again = b"" if find_path(self._tree, _is_mutable_leaf) is None else structure
        elif self._again:
            self._tree = pickle.loads(self._again)

    def unpack(self, content: torch.Tensor) -> Any:
        """Unpack a batch.

        Args:
            content: The bytes of its tensors, concatenated: shape (nbytes,), dtype uint8.

        Returns:
            The batch. Its tensors are copies, so that a small one does not keep the full buffer alive.
        """
        position = 0

        def read_tensor(info: TensorInformation) -> torch.Tensor:
            nonlocal position
            start, position = position, position + info.shape.numel() * info.dtype.itemsize
            return content[start:position].clone().view(info.dtype).view(info.shape)

        return recursively_apply(read_tensor, self._tree, test_type=is_tensor_information)


def check_same_structure(batches: Sequence[Any]) -> None:
    """Raise unless the batches of one step have the same types of containers in the same positions.

    Shapes, the lengths of lists, and leaves (also None) may differ, but no code that is the same on all
    processes can handle other differences.

    Args:
        batches: One per process, at least one.

    Raises:
        TypeError: If they differ.
    """
    # Compared here, where all of them are available: the receiving processes could only hang.
    for rank, batch in enumerate(batches[1:], 1):
        found = _difference(batches[0], batch, "batch")
        if found:
            place, one, other = found
            raise TypeError(
                f"The batches of one step differ in their structure: {place} is {one} for process 0, but "
                f"{other} for process {rank}. Make the collate_fn return the same structure for all batches, "
                "with None for what is missing, or pass dispatch_batches=False."
            )


def _outline_of(batch: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a value that is equal for batches of the same structure; fast, for the usual batch.

    Args:
        batch: The batch.
        tensors: Receives the bytes of its tensors, as sent in a packet.

    Returns:
        None if it contains anything but plain tensors in lists, tuples and dicts with string keys.
    """
    kind = type(batch)
    if kind is torch.Tensor:
        if not _is_plain(batch):
            return None
        tensors.append(_as_bytes(batch))
        return batch.dtype, batch.shape
    if kind is dict:
        if not all(type(key) is str for key in batch):
            return None
        inside: Any = batch.values()
    elif kind is list or kind is tuple:
        inside = batch
    else:
        return None
    outlines = []
    for child in inside:
        outline = _outline_of(child, tensors)
        if outline is None:
            return None
        outlines.append(outline)
    return kind, tuple(batch) if kind is dict else None, outlines


def _difference(one: Any, other: Any, place: str) -> tuple[str, str, str] | None:
    if one is None or other is None:
        return None
    inside, others = children(one), children(other)
    if inside is None and others is None:
        return None
    if inside is None or others is None or type(one) is not type(other):
        return place, _named(one), _named(other)
    names, other_names = keys(one), keys(other)
    if not isinstance(one, list) and names != other_names and set(names) != set(other_names):
        return place, _named(one), _named(other)
    if names != other_names and isinstance(one, Mapping):
        others = [other[name] for name in names]
    attribute = not isinstance(one, (list, tuple, Mapping))
    for name, child, other_child in zip(names, inside, others, strict=False):
        if child is other_child or (
            isinstance(child, torch.Tensor) and isinstance(other_child, torch.Tensor)
        ):
            continue
        found = _difference(child, other_child, f"{place}.{name}" if attribute else f"{place}[{name!r}]")
        if found:
            return found
    return None


def _named(value: Any) -> str:
    kind = f"a {type(value).__name__}"
    if isinstance(value, torch.Tensor) or children(value) is None:
        return kind
    return f"{kind} of {keys(value) if not isinstance(value, (list, tuple)) else len(value)}"


def _is_mutable_leaf(node: Any) -> bool:
    return children(node) is None and not isinstance(node, _IMMUTABLE)


def _unpicklable(tree: Any, error: Exception) -> str:
    found = find_path(tree, _fails_alone, "batch")
    place, leaf = found or ("batch", tree)
    return (
        f"{place} is of type {type(leaf).__name__}, which cannot be pickled to be sent to another process "
        f"({error}). Leave it out in the collate_fn, or pass dispatch_batches=False."
    )


def _fails_alone(node: Any) -> bool:
    if children(node) is not None:
        return False
    try:
        pickle.dumps(node)
    except Exception:
        return True
    return False


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    is_simple = tensor.is_cpu and tensor.is_contiguous() and tensor.numel() > 1 and not tensor.requires_grad
    if is_simple and not tensor.is_conj() and not tensor.is_neg():  # as below, in a third of the time
        return tensor.view(-1).view(torch.uint8)
    return as_bytes(tensor.detach().cpu())


def _is_plain(leaf: Any) -> bool:
    plain = type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout == torch.strided
    return plain and not leaf.is_nested and not leaf.is_quantized
