"""Reading a checkpoint by ranges of bytes.

saved chunk      | row 0 | row 1 | row 2 | row 3 |      written as one item, by torch.save
wanted box               | row 1 | row 2 |              torch reads the item and narrows it; here: these bytes
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

from fsdp_passes._compat import saved_tensor

# Below it, to read an item at once is faster than to find out what its header says: 0.5 against 10 ms on a CPU.
_SMALL_BYTES = 256 << 10


class RangeReader(FileSystemReader):
    """A FileSystemReader that reads of a large saved tensor what is wanted, in memory of that size."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.fs = _Files()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._chunk_sizes: dict[tuple[str, torch.Size | None], torch.Size] = {
            (name, chunk.offsets): chunk.sizes
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        parts: dict[str, list[ReadItem]] = {}  # by file
        rest = []
        for item in plan.items:
            if self._is_part(item):
                parts.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
            else:
                rest.append(item)
        for name, items in parts.items():
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
                rest += [item for item in items if not self._read_part(stream, item, planner)]
        return super().read_data(LoadPlan(rest, plan.storage_data, plan.planner_data), planner)

    def _is_part(self, item: ReadItem) -> bool:
        """Whether less is wanted than was saved, which is large, in a file that is as torch.save wrote it."""
        stored = self.storage_data[item.storage_index]
        sizes = self._chunk_sizes.get((item.storage_index.fqn, item.storage_index.offset))
        return sizes not in (None, item.lengths) and stored.length >= _SMALL_BYTES and not stored.transform_descriptors

    def _read_part(self, stream: Any, item: ReadItem, planner: LoadPlanner) -> bool:
        """Whether it was read: not if the elements do not lie in the file in their order and as they are."""
        stored = self.storage_data[item.storage_index]
        tensor, start = saved_tensor(super()._slice_file(stream, stored))
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return False
        start += stored.offset + tensor.storage_offset() * tensor.itemsize
        part = read_box(stream, start, tensor, item.storage_offsets, item.lengths)
        target = planner.resolve_tensor(item).detach()
        target.copy_(part)
        planner.commit_tensor(item, target)
        return True

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        """What is small in memory, where torch.load's many seeks cost nothing."""
        if sinfo.length >= _SMALL_BYTES:
            return super()._slice_file(file, sinfo)
        file.seek(sinfo.offset)
        return io.BytesIO(file.read(sinfo.length))


def read_box(stream: Any, start: int, like: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The box of a contiguous tensor with the shape and dtype of `like`, which begins at byte `start` of `stream`.

    Reads from the first element of the box to the last.
    """
    strides = like.stride()
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    stream.seek(start + first * like.itemsize, io.SEEK_SET)
    data = bytearray(span * like.itemsize)
    if (count := stream.readinto(data)) != len(data):
        raise EOFError(f"expected {len(data)} bytes of a saved tensor, got {count}")
    return torch.frombuffer(data, dtype=like.dtype).as_strided(tuple(sizes), strides)


class _Files(FileSystem):
    """Opens files without a buffer, which would be filled again after each of torch.load's many seeks."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with _File(path, mode) as stream:
            yield stream


class _File(io.FileIO):
    def readinto(self, buffer: Any) -> int:
        """As much as there is: one system call reads 2 GiB at most."""
        view, done = memoryview(buffer), 0
        while done < len(view) and (count := super().readinto(view[done:])):
            done += count
        return done
