"""Bytes of real text, cut into training and held-out parts and drawn in reproducible batches."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .parsing import InputError

HELD_OUT = 0.1
"""Share of the text that is never trained on: the end of each of ``PIECES`` equal pieces."""

PIECES = 16

LARGEST = 2**30
"""Bytes of one file: each process holds all text in memory, twice while it reads."""


class Corpus:
    """Text as bytes, uint8 [n], and batches of sequences of ``seq_len``; InputError says if it is too short."""

    def __init__(self, text: Tensor, seq_len: int) -> None:
        # Text drifts from its beginning to its end; parts of each piece make both halves alike.
        pieces = text.tensor_split(PIECES)
        cuts = [int(len(piece) * (1 - HELD_OUT)) for piece in pieces]
        self.train = torch.cat([piece[:cut] for piece, cut in zip(pieces, cuts, strict=True)])
        self.held_out = torch.cat([piece[cut:] for piece, cut in zip(pieces, cuts, strict=True)])
        self.seq_len = seq_len
        if len(self.held_out) <= seq_len:
            needed = int((seq_len + 2) / HELD_OUT)
            raise InputError(
                f"--text must hold at least {needed} bytes for --seq-len {seq_len}, got {len(text)}; give more text"
            )

    def batch(self, batch_size: int, seed: int, step: int, rank: int) -> Tensor:
        """Return the batch of one rank and step, int64 [batch_size, seq_len + 1]; the same whenever asked."""
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 16_411 + rank)
        starts = torch.randint(len(self.train) - self.seq_len, (batch_size, 1), generator=generator)
        return self.train[starts + torch.arange(self.seq_len + 1)].long()

    def held_out_batch(self, batch_size: int, index: int, count: int) -> Tensor:
        """Return one of ``count`` fixed, evenly spread held-out batches, as ``batch``."""
        room = len(self.held_out) - self.seq_len - 1
        numbers = torch.arange(batch_size) * count + index
        starts = (numbers * room // (batch_size * count))[:, None]
        return self.held_out[starts + torch.arange(self.seq_len + 1)].long()


def load_text(files: Sequence[str]) -> Tensor:
    """Read files, one after the other, as uint8 [n]; none: Python's own documentation topics.

    A folder stands for all files of text in it and below, in the order of their names; hidden ones and those that hold
    a zero byte, as pictures and programs do, are left out. What can't be read, is empty, or is larger than ``LARGEST``
    is an InputError.
    """
    if not files:
        from pydoc_data.topics import topics

        texts = [text.encode() for text in topics.values()]
    else:
        texts = [text for name in files for text in (_texts(name) if Path(name).is_dir() else [_read(name)])]
    content = bytearray(b"\n\n".join(texts))
    if len(content) > LARGEST:
        raise InputError(f"--text has more than {LARGEST:,} bytes in all; give a part of it")
    return torch.frombuffer(content, dtype=torch.uint8)


def _texts(folder: str) -> list[bytes]:
    """Read the files of text in a folder and below."""
    below = [path for path in sorted(Path(folder).rglob("*")) if path.is_file() and path.stat().st_size]
    seen = [path for path in below if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    sizes = sum(path.stat().st_size for path in seen)
    if sizes > LARGEST:
        raise InputError(f"--text {folder} has more than {LARGEST:,} bytes; give a part of it")
    texts = [text for text in map(_read, map(str, seen)) if b"\0" not in text]
    if not texts:
        raise InputError(f"--text {folder} has no file of text in it; give a folder with some")
    return texts


def _read(name: str) -> bytes:
    path = Path(name)
    try:
        # Of a pipe each rank would get a part, or wait for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"--text {name} can't be read: it must be a file or a folder, not a pipe or a device")
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise InputError(f"--text {name} can't be read: {error.strerror or error}") from error
    if not content:
        raise InputError(f"--text {name} is empty; give a file with text in it")
    if len(content) > LARGEST:
        raise InputError(f"--text {name} has more than {LARGEST:,} bytes; give a part of it")
    return content
