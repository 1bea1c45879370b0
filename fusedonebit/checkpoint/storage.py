"""Folders of ``torch.distributed.checkpoint`` with a checksum per stored chunk, read without running code.

Torch's own writer and reader do the work, and torch alone can read such a folder as well. What is added:

- Each entry of the metadata has the CRC-32 of its bytes as they lie in the file: of each rank's own piece, so that
  whoever reads a piece, on however many ranks, can check it first.
- ``.metadata`` ends with the CRC-32 of all before it, behind the end of the pickle, where unpickling does not look.
- ``.metadata`` is read as data (``metadata.read``), of files none but the folder's own are, and objects with
  ``weights_only=True``; torch itself would run whatever a folder tells it to.

A folder without checksums, of torch alone or of an earlier version, is read unchecked.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.futures import Future

from ..errors import CheckpointError
from . import metadata

_SEAL = re.compile(rb"\nfusedonebit crc32 ([0-9a-f]{8})\n")
_SEAL_BYTES = len("\nfusedonebit crc32 01234567\n")
_PIECE = 1 << 24  # bytes read at once
_LARGEST = 1 << 30  # bytes of metadata: millions of pieces


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    """Turn an error into one that can travel to the other ranks: not every exception can."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from error


def _check_folder(checkpoint_id: object) -> None:
    if not isinstance(checkpoint_id, (str, os.PathLike)):
        raise TypeError(f"checkpoint_id must be the path of a checkpoint's folder, got {checkpoint_id!r}")


class CheckedWriter(torch_dcp.FileSystemWriter):
    """Torch's writer, which then reads back what it has written to sum it up."""

    def __init__(self, checkpoint_id: str | os.PathLike[str]) -> None:
        _check_folder(checkpoint_id)
        super().__init__(checkpoint_id)
        _open_url(self, checkpoint_id)

    @_as_checkpoint_error()
    def prepare_local_plan(self, plan: Any) -> Any:
        """Prepare what this rank writes; raise CheckpointError if that fails."""
        return super().prepare_local_plan(plan)

    @_as_checkpoint_error()
    def write_data(self, plan: Any, planner: Any) -> Future[list[Any]]:
        """Write this rank's tensors, with a checksum for each; wait for the end."""
        written = super().write_data(plan, planner)
        written.wait()
        entries = [result.storage_data for result in written.value()]
        for entry, crc32 in zip(entries, _checksums(self, entries), strict=True):
            entry.crc32 = crc32
        return written

    @_as_checkpoint_error()
    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Write the metadata, and their own checksum behind them."""
        files = self.fs
        self.fs = _Sealing(files)  # type: ignore[assignment]  # it is one in all but its class
        try:
            super().finish(metadata, results)
        finally:
            self.fs = files


class CheckedReader(torch_dcp.FileSystemReader):
    """Torch's reader, which reads each chunk only after its checksum was found right.

    Args:
        checkpoint_id: The folder.
        weights_only: Whether to refuse metadata in which there is anything but metadata, and files that are not the
            folder's own.

    Attributes:
        metadata_crc32: Of the bytes of ``.metadata``, once they have been read.
    """

    def __init__(self, checkpoint_id: str | os.PathLike[str], weights_only: bool = True) -> None:
        _check_folder(checkpoint_id)
        super().__init__(checkpoint_id)
        _open_url(self, checkpoint_id)
        if weights_only and type(self.fs) is FileSystem:
            self.fs = _OwnFiles(self.path)
        self._weights_only = weights_only
        self._metadata: Metadata | None = None
        self.metadata_crc32 = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare to read another checkpoint."""
        super().reset(checkpoint_id)
        self._metadata = None

    @_as_checkpoint_error()
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata, once, so that what was agreed on is what is loaded."""
        if self._metadata is not None:
            return self._metadata
        path = self.fs.concat_path(self.path, ".metadata")
        if not self.fs.exists(path):
            raise CheckpointError(f"{self.path} must be the folder of a complete checkpoint, but it {self._lacks()}")
        with self.fs.create_stream(path, "rb") as file:
            if (size := file.seek(0, os.SEEK_END)) > _LARGEST:
                raise CheckpointError(f".metadata must have at most {_LARGEST} bytes, but has {size}")
            file.seek(0)
            data = file.read()
        body, seal = data[:-_SEAL_BYTES], _SEAL.fullmatch(data[-_SEAL_BYTES:])
        if seal is None:
            body = data
        elif int(seal[1], 16) != zlib.crc32(body):
            raise CheckpointError(
                ".metadata is damaged: its checksum is not that of its bytes; load another checkpoint"
            )
        self._metadata = metadata.read(body) if self._weights_only else _unpickled(body)
        self.metadata_crc32 = zlib.crc32(data)
        return self._metadata

    def _lacks(self) -> str:
        """Return why there is no ``.metadata`` to read."""
        if not self.fs.exists(self.path):
            return "does not exist"
        if Path(self.path).is_file():
            return "is a file; torch.load reads those that torch.save has written"
        return "has no .metadata, which is written last"

    @_as_checkpoint_error()
    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        """Read tensors, after checking their checksums; raise CheckpointError for a damaged one."""
        wanted = {item.storage_index: None for item in plan.items}  # each once, in order
        entries = {index: self.storage_data[index] for index in wanted}
        for (index, entry), crc32 in zip(entries.items(), _checksums(self, entries.values()), strict=True):
            if crc32 != getattr(entry, "crc32", crc32):
                where = "" if not index.offset else f", the piece at {tuple(index.offset)},"
                raise CheckpointError(
                    f"{index.fqn}{where} in {entry.relative_path} is damaged: its checksum is {crc32:08x}, that of "
                    f"what was saved {entry.crc32:08x}; load another checkpoint"
                )
        return super().read_data(plan, planner)


class PlainValues(torch_dcp.DefaultLoadPlanner):
    """Torch's planner, but objects are read as ``torch.load(weights_only=True)`` does."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Read an object as plain values; raise CheckpointError if that could run code."""
        try:
            plain = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{read_item.dest_index.fqn} is neither tensors nor plain values, and reading it could run code; if "
                "you trust the checkpoint, pass weights_only=False"
            ) from error
        again = io.BytesIO()  # what torch unpickles then is ours
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)


class _OwnFiles(FileSystem):
    """Opens regular files of one folder, and whatever a checkpoint names, no device, no pipe and no file elsewhere."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = folder

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        real = Path(path).resolve()
        if not real.is_relative_to(Path(self._folder).resolve()) or (real.exists() and not real.is_file()):
            raise CheckpointError(
                f"{path} must be a regular file of {self._folder}, which {real} is not; copy a folder of links with "
                "cp -rL (or pass weights_only=False, if you trust all that they lead to), else load another checkpoint"
            )
        with real.open(mode) as file:
            yield file


class _Sealing:
    """Wraps a file system: the metadata gets its checksum appended before it gets its name."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def rename(self, path: Any, new_path: Any) -> None:
        with self._files.create_stream(path, "rb") as file:
            data = file.read()
        with self._files.create_stream(path, "wb") as file:
            file.write(data + f"\nfusedonebit crc32 {zlib.crc32(data):08x}\n".encode())
            try:
                file.flush()
                os.fsync(file.fileno())
            except (AttributeError, io.UnsupportedOperation):
                os.sync()
        self._files.rename(path, new_path)


def _unpickled(data: bytes) -> Metadata:
    """Return what is pickled, and run whatever that names."""
    stream = io.BytesIO(data)
    found: Metadata = pickle.load(stream)
    if stream.read():
        raise CheckpointError(".metadata is damaged: there is something behind its end; load another checkpoint")
    return found


def _checksums(storage: Any, entries: Iterable[Any]) -> list[int]:
    """Return the CRC-32 of each entry's bytes in its file."""
    sums = []
    for entry in entries:
        with storage.fs.create_stream(storage.fs.concat_path(storage.path, entry.relative_path), "rb") as file:
            if (size := file.seek(0, os.SEEK_END)) < (end := entry.offset + entry.length):
                raise CheckpointError(f"{entry.relative_path} must have at least {end} bytes, but has {size}")
            file.seek(entry.offset)
            crc32, left = 0, entry.length
            while left > 0 and (piece := file.read(min(left, _PIECE))):
                crc32, left = zlib.crc32(piece, crc32), left - len(piece)
        sums.append(crc32)
    return sums


def _open_url(storage: Any, checkpoint_id: str | os.PathLike[str]) -> None:
    """Make torch's writer or reader of a path one of a URL, where that is given and is no path itself."""
    scheme, _, path = str(checkpoint_id).rpartition("://")
    if scheme in ("file", "local"):
        storage.path = Path(path)
    elif scheme:
        from torch.distributed.checkpoint._fsspec_filesystem import FileSystem

        storage.fs = FileSystem()
        storage.path = storage.fs.init_path(checkpoint_id)
