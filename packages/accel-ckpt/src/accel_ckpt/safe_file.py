"""Writing the safetensors format into an open file, tensor by tensor.

The format (https://github.com/huggingface/safetensors#format): the length of the header as 8 bytes, little
endian; the header, JSON padded with spaces; the tensors' bytes, one after the other. The library's own
`save_file` writes the same but for the order of the metadata, which differs from call to call; here equal
states give equal files, and no second copy of them is made in memory.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from typing import IO, Any

import torch

__all__ = ["DTYPES", "dump"]

_NAMES = {  # in the order of the library: by size, and then its own
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}

DTYPES = {getattr(torch, name): code for name, code in _NAMES.items() if hasattr(torch, name)}
"""What the format calls the dtypes that it has."""


def dump(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], file: IO[bytes]) -> None:
    """Write tensors as safetensors.

    Args:
        tensors: Contiguous tensors of a dtype in `DTYPES`, by name.
        metadata: Texts to keep with them.
        file: Where to write.
    """
    # Large elements first, so that every tensor is aligned.
    order = list(DTYPES)
    names = sorted(tensors, key=lambda name: (-order.index(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        _write_bytes(tensors[name], file)


def _write_bytes(tensor: torch.Tensor, file: IO[bytes]) -> None:
    tensor = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    size = tensor.numel() * tensor.element_size()
    if size:
        file.write(memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())))
