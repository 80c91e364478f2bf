"""Ranges of the tensors in safetensors files, without the library, which reads whole rows.

    file     length of the header (8 bytes, little-endian) | header, JSON | the tensors' bytes
    header   name -> {"dtype": "BF16", "shape": [2, 3], "data_offsets": [first, end]}, counted from the header's end

Source of the format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_STAGED_BYTES = 4 << 20  # read at a time: large enough for any disk, small beside a unit


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, whose first byte is byte `start` of it."""

    file: Path
    start: int
    shape: torch.Size
    dtype: torch.dtype

    def read(self, target: Tensor, first: int = 0) -> None:
        """Fill `target`, 1-D, with the flattened tensor's elements from `first` on, cast to its dtype."""
        parts = target.split(_STAGED_BYTES // self.dtype.itemsize) if target.numel() else ()
        staged = bytearray(max((part.numel() for part in parts), default=0) * self.dtype.itemsize)
        with open(self.file, "rb", buffering=0) as file:
            file.seek(self.start + first * self.dtype.itemsize)
            for part in parts:
                _fill(memoryview(staged)[: part.numel() * self.dtype.itemsize], file)
                part.copy_(torch.frombuffer(staged, dtype=self.dtype, count=part.numel()))


def _fill(buffer: memoryview, file: io.FileIO) -> None:
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise EOFError(f"{file.name} ends too early")
        buffer = buffer[count:]


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """The tensors, by name, in a file, in the files of an index, or in those of a folder.

    Raises ValueError for what is no safetensors file, and for a name that is in two files; OSError for a missing file.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in _files(path):
        for name, tensor in _read_header(file).items():
            if name in tensors:
                raise ValueError(
                    f"path: expected each tensor in one file, got {name} in {tensors[name].file} and in {file}"
                )
            tensors[name] = tensor
    return tensors


def _files(path: Path) -> list[Path]:
    if path.suffix == ".json":
        try:
            return [path.parent / file for file in sorted(set(json.loads(path.read_bytes())["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f'path: expected an index with a "weight_map", got {path}') from error
    if not path.is_dir():
        return [path]
    indexes, files = sorted(path.glob("*.safetensors.index.json")), sorted(path.glob("*.safetensors"))
    if len(indexes) == 1:
        return _files(indexes[0])
    if indexes or not files:
        raise ValueError(f"path: expected a folder with safetensors files and at most one index, got {path}")
    return files


def _read_header(file: Path) -> dict[str, StoredTensor]:
    with open(file, "rb", buffering=0) as raw:
        end = file.stat().st_size
        start = 8 + int.from_bytes(raw.read(8), "little")
        if not 8 < start <= end:
            raise ValueError(f"path: expected a safetensors file, got {file}, which has no whole header")
        header = bytearray(start - 8)
        _fill(memoryview(header), raw)
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        return {name: _tensor(file, start, end, **entry) for name, entry in entries.items()}
    except Exception as error:  # whatever a header may make of json and of numbers
        raise ValueError(
            f"path: expected a safetensors file, got {file}, whose header cannot be read: {error}"
        ) from error


def _tensor(file: Path, start: int, end: int, dtype: str, shape: list[int], data_offsets: list[int]) -> StoredTensor:
    """The tensor of one header entry; `start` and `end` are those of all tensors' bytes in the file."""
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype} is not known")
    tensor = StoredTensor(file, start + data_offsets[0], torch.Size(shape), _DTYPES[dtype])
    num_bytes = tensor.shape.numel() * tensor.dtype.itemsize
    if num_bytes != data_offsets[1] - data_offsets[0] or not start <= tensor.start <= end - num_bytes:
        raise ValueError(f"{num_bytes} bytes at {data_offsets} are not in the file")
    return tensor
