"""Reads torch's metadata from its pickle as data: nothing that the pickle names is called or changed.

``read`` knows the few opcodes in which Pythons pickle torch's metadata (protocols 4 and 5), and by name only what
metadata consists of. It raises ``CheckpointError`` for all else, and where the pieces that are described can't be
those of whole tensors. Time and memory are bounded by the bytes that there are, whatever numbers stand in them.

Other readers don't do. With ``pickle.Unpickler`` the opcode BUILD sets attributes of the very classes that a white-list
lets pass, and one large number makes its memo take gigabytes. That of ``torch.load(weights_only=True)`` reads protocol
2 alone, and lacks STACK_GLOBAL and MEMOIZE, of which ``.metadata`` is full.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Collection
from dataclasses import fields
from itertools import pairwise, product
from pathlib import PurePosixPath, PureWindowsPath
from struct import Struct
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..errors import CheckpointError

_LONGEST = 64  # dimensions, parts of a path: what is shared costs its length each time
_SPLIT = 8  # dimensions in which a tensor is cut into pieces
_DEEPEST = 1 << 14  # values on the stack: pickle fills lists and dicts by a thousand items at once
_BYTE, _TWO_BYTES, _FOUR_BYTES, _EIGHT_BYTES, _SIGNED = map(Struct, ("<B", "<H", "<I", "<Q", "<i"))
_ENUMERATION = "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING"
_CLASSES: dict[str, type] = {
    "torch.distributed.checkpoint.filesystem._StorageInfo": _StorageInfo,
    **{f"torch.distributed.checkpoint.metadata.{name}": getattr(torchs, name) for name in torchs.__all__},
}
_ATTRIBUTES = {kind: {field.name for field in fields(kind)} | {"crc32"} for kind in _CLASSES.values()}
_PROPERTIES = {torch.dtype, torch.layout, bool, _MEM_FORMAT_ENCODING}
_KINDS: dict[str, tuple[type, ...]] = {  # of attributes; those that are not here may be anything of all this
    "state_dict_metadata": (dict,),
    "storage_data": (dict,),
    "properties": (TensorProperties,),
    "size": (torch.Size,),
    "chunks": (list,),
    "offsets": (torch.Size,),
    "sizes": (torch.Size,),
    "fqn": (str,),
    "offset": (torch.Size, int, type(None)),
    "index": (int, type(None)),
    "relative_path": (str,),
    "length": (int,),
    "transform_descriptors": (type(None),),  # a compressed file may be of any size
    "crc32": (int,),
}


def read(data: bytes) -> Metadata:
    """Return the metadata of which ``data`` is the pickle; raise ``CheckpointError`` if it is anything else."""
    reader = _Reader(data)
    try:
        return _checked(reader.read(), len(data))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f".metadata is damaged, at byte {reader.at} of {len(data)}: {type(error).__name__}: {error}; load another "
            "checkpoint"
        ) from error


class _Reader:
    """Follows a pickle's opcodes, with the stack, the marks on it and the memo that they speak of."""

    def __init__(self, data: bytes) -> None:
        self.at = 0
        self._data = data
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        stack, memo, push, number = self._stack, self._memo, self._stack.append, self._number
        meanings: dict[bytes, Callable[[], object]] = {
            pickle.PROTO: lambda: number(_BYTE),
            pickle.FRAME: lambda: self._has(number(_EIGHT_BYTES)),
            pickle.NONE: lambda: push(None),
            pickle.NEWTRUE: lambda: push(True),
            pickle.NEWFALSE: lambda: push(False),
            pickle.BININT1: lambda: push(number(_BYTE)),
            pickle.BININT2: lambda: push(number(_TWO_BYTES)),
            pickle.BININT: lambda: push(number(_SIGNED)),
            pickle.LONG1: lambda: push(int.from_bytes(self._bytes(number(_BYTE)), "little", signed=True)),
            pickle.SHORT_BINUNICODE: lambda: push(self._bytes(number(_BYTE)).decode()),
            pickle.BINUNICODE: lambda: push(self._bytes(number(_FOUR_BYTES)).decode()),
            pickle.MARK: lambda: self._marks.append(len(stack)),
            pickle.MEMOIZE: lambda: memo.append(stack[-1]),
            pickle.BINGET: lambda: push(memo[number(_BYTE)]),
            pickle.LONG_BINGET: lambda: push(memo[number(_FOUR_BYTES)]),
            pickle.EMPTY_LIST: lambda: push([]),
            pickle.EMPTY_DICT: lambda: push({}),
            pickle.EMPTY_TUPLE: lambda: push(()),
            pickle.TUPLE1: lambda: push(tuple(self._take(1))),
            pickle.TUPLE2: lambda: push(tuple(self._take(2))),
            pickle.TUPLE3: lambda: push(tuple(self._take(3))),
            pickle.TUPLE: lambda: push(tuple(self._take_marked())),
            pickle.APPEND: lambda: self._extend(self._take(1)),
            pickle.APPENDS: lambda: self._extend(self._take_marked()),
            pickle.SETITEM: lambda: self._update(self._take(2)),
            pickle.SETITEMS: lambda: self._update(self._take_marked()),
            pickle.STACK_GLOBAL: lambda: push(_named(*self._take(2))),
            pickle.NEWOBJ: lambda: push(_made(*self._take(2))),
            pickle.REDUCE: lambda: push(_called(*self._take(2))),
            pickle.BUILD: self._build,
        }
        self._meanings = {opcode[0]: meaning for opcode, meaning in meanings.items()}

    def read(self) -> Any:
        """Return what the pickle describes, which must be one value, with nothing behind it."""
        data, meanings, stack, stop = self._data, self._meanings, self._stack, pickle.STOP[0]
        while (opcode := data[self.at]) != stop:
            self.at += 1
            if opcode not in meanings:
                raise ValueError(f"there is no metadata with the opcode {opcode:#04x}")
            meanings[opcode]()
            if len(stack) + len(self._marks) > _DEEPEST:
                raise ValueError("no metadata is nested so deeply")
        self.at += 1
        if len(self._stack) != 1 or self._marks or self.at != len(data):
            raise ValueError("there must be one value, and nothing behind it")
        return self._stack[0]

    def _number(self, layout: Struct) -> int:
        (number,) = layout.unpack_from(self._data, self.at)
        self.at += layout.size
        return number  # type: ignore[no-any-return]

    def _has(self, length: int) -> None:
        if length > (left := len(self._data) - self.at):
            raise ValueError(f"{length} bytes must follow, but there are {left}")

    def _bytes(self, length: int) -> bytes:
        self._has(length)
        self.at += length
        return self._data[self.at - length : self.at]

    def _take(self, count: int) -> list[Any]:
        start = len(self._stack) - count
        if start < 0:
            raise ValueError(f"there must be {count} values, but there are {len(self._stack)}")
        return self._cut(start)

    def _take_marked(self) -> list[Any]:
        return self._cut(self._marks.pop())

    def _cut(self, start: int) -> list[Any]:
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _extend(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise ValueError("what is appended to must be a list")
        self._stack[-1].extend(items)

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict:
            raise ValueError("what gets keys must be a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, MetadataIndex) or key in target:  # to hash deep tuples would end the process
                raise ValueError("a key must be text or an index, and each another")
            target[key] = value

    def _build(self) -> None:
        (state,) = self._take(1)
        made = self._stack[-1]
        if type(made) not in _ATTRIBUTES or vars(made):
            raise ValueError("what gets attributes must be new")
        if type(made) is TensorProperties:
            if type(state) is not tuple or len(state) > _LONGEST or not {type(value) for value in state} <= _PROPERTIES:
                raise ValueError("the properties of a tensor must be a tuple of them")
            made.__setstate__(state)
            return
        if type(state) is not dict or not state.keys() <= _ATTRIBUTES[type(made)]:
            raise ValueError(f"{type(made).__name__} must have its own attributes alone")
        for name, value in state.items():
            if type(value) not in _KINDS.get(name, (type(value),)):
                raise ValueError(f"{type(made).__name__}.{name} can't be of type {type(value).__name__}")
        vars(made).update(state)


# ---------------------------------------------------------------- names


def _named(module: Any, name: Any) -> Any:
    """Return a data type of torch, or the full name of what may be made or called."""
    if type(module) is not str or type(name) is not str:
        raise ValueError("names must be text")
    if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
        return found
    if (full := f"{module}.{name}") in _CLASSES or full in _CALLS:
        return full
    raise CheckpointError(
        f".metadata asks for {full}, which is no part of metadata, and making it could run code; if you trust the "
        "checkpoint, pass weights_only=False"
    )


def _made(name: Any, arguments: Any) -> Any:
    if type(name) is not str or type(arguments) is not tuple or arguments:
        raise ValueError("what is made must have a name, and no arguments")
    kind: Any = _CLASSES[name]
    return kind.__new__(kind)


def _called(name: Any, arguments: Any) -> Any:
    if type(name) is not str or type(arguments) is not tuple or len(arguments) > _LONGEST:
        raise ValueError("what is called must have a name, and few arguments")
    return _CALLS[name](*arguments)


def _size(lengths: Any) -> torch.Size:
    if type(lengths) is not tuple or len(lengths) > _LONGEST or not all(_is_count(length) for length in lengths):
        raise ValueError("a size must be a tuple of numbers >= 0")
    return torch.Size(lengths)


def _layout(name: Any) -> torch.layout:
    if type(name) is not str or not isinstance(found := vars(torch).get(name.removeprefix("torch.")), torch.layout):
        raise ValueError("a layout must be one of torch's")
    return found


def _memory_format(value: Any) -> _MEM_FORMAT_ENCODING:
    if type(value) is not int:
        raise ValueError("a memory format must be given by its number")
    return _MEM_FORMAT_ENCODING(value)


def _member(of: Any, name: Any) -> _MEM_FORMAT_ENCODING:
    """Return the member of the enumeration: Python 3.11.0 to 3.11.3 pickles it as a call of ``getattr``."""
    if of != _ENUMERATION or type(name) is not str:
        raise ValueError("getattr must be of an enumeration and the name of a member")
    return _MEM_FORMAT_ENCODING.__members__[name]


_CALLS: dict[str, Callable[..., Any]] = {
    "torch.Size": _size,
    "torch.serialization._get_layout": _layout,
    _ENUMERATION: _memory_format,
    "builtins.getattr": _member,
    **{f"{module}.PosixPath": PurePosixPath for module in ("pathlib", "pathlib._local")},
    **{f"{module}.WindowsPath": PureWindowsPath for module in ("pathlib", "pathlib._local")},
}


# ---------------------------------------------------------------- the whole


def _checked(found: Any, most: int) -> Metadata:
    """Return it, if it is metadata and all of each tensor is stored once, in bytes of its own; or raise ValueError."""
    if type(found) is not Metadata:
        raise ValueError(f"it must be Metadata, got {type(found).__name__}")
    needed: set[MetadataIndex] = set()
    for name, entry in found.state_dict_metadata.items():
        if type(name) is not str or type(entry) not in (BytesStorageMetadata, TensorStorageMetadata):
            raise ValueError("what is saved must have a name, and be a tensor or bytes")
        if not isinstance(entry, TensorStorageMetadata):
            needed.add(MetadataIndex(name))
            continue
        if (most := most - len(entry.chunks)) < 0:
            raise ValueError("it has more pieces than bytes")
        if not _covers(entry.chunks, entry.size):
            raise ValueError(f"the pieces of {name} must be all of it, none of them twice")
        needed |= {MetadataIndex(name, piece.offsets) for piece in entry.chunks}
    if missing := needed - found.storage_data.keys():
        raise ValueError(f"{min(index.fqn for index in missing)} must be stored somewhere")
    _check_files(found.storage_data.values())
    return found


def _covers(pieces: list[Any], size: torch.Size) -> bool:
    """Return whether each element is in exactly one piece.

    Where pieces meet, their corners do, so that each occurs an even number of times, but for the tensor's own. If that
    is so, each element is in an odd number of pieces; and if there are as many elements in pieces as in the tensor, it
    is in one.
    """
    boxes = []
    for piece in pieces:
        if type(piece) is not ChunkStorageMetadata:
            return False
        boxes.append([(start, start + length) for start, length in zip(piece.offsets, piece.sizes, strict=True)])
        if len(size) != len(boxes[-1]) or any(end > length for (_, end), length in zip(boxes[-1], size, strict=True)):
            return False
    if sum(math.prod(end - start for start, end in box) for box in boxes) != math.prod(size):
        return False
    split = [i for i, length in enumerate(size) if any(box[i] != (0, length) for box in boxes)]
    if len(split) > _SPLIT:
        return False
    corners: set[tuple[int, ...]] = set()
    for box in boxes:
        if all(start < end for start, end in box):
            corners ^= set(product(*(box[i] for i in split)))
    return math.prod(size) == 0 or corners == set(product(*((0, size[i]) for i in split)))


def _check_files(entries: Collection[Any]) -> None:
    if not all(
        type(entry) is _StorageInfo and _is_count(entry.offset) and _is_count(entry.length) for entry in entries
    ):
        raise ValueError("where an entry is stored must be a file, a start and a length")
    if len({hasattr(entry, "crc32") for entry in entries}) > 1:
        raise ValueError("either all entries must have a checksum or none")
    for kind in (PurePosixPath, PureWindowsPath):
        for path in map(kind, {entry.relative_path for entry in entries}):
            if path.anchor or ".." in path.parts:
                raise ValueError(f"a file must be in the checkpoint's folder, got {str(path)!r}")
    stored = sorted((entry.relative_path, entry.offset, entry.offset + entry.length) for entry in entries)
    for (file, _, end), (other, start, _) in pairwise(stored):
        if file == other and start < end:
            raise ValueError(f"bytes from {start} on are of two entries of {file}")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
