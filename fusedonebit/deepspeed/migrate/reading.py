"""Reads a DeepSpeed config: JSON, with the comments and trailing commas that DeepSpeed's hjson takes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, BinaryIO

from ...apps.parsing import InputError, printable
from .deepspeed_config import Config

LARGEST = 1 << 20
"""Bytes of a config: a thousand times those of DeepSpeed's own."""

# What ends a string or a comment may be missing: then it goes on to the end, so that one pass is enough.
_STRING = r'("[^"\\]*(?:\\(?:.|\Z)[^"\\]*)*(?:"|\Z))'
_COMMENT = re.compile(_STRING + r"|/\*.*?(?:\*/|\Z)|(?:#|//)[^\n]*", re.DOTALL)
_LAST_COMMA = re.compile(_STRING + r"|,(?=\s*[\]}])", re.DOTALL)

HINT = "; keys and strings need their quotes, which DeepSpeed's hjson does not ask for"


def read(path: str) -> Config:
    """Read a config from a file; ``-`` is the standard input.

    Raises:
        InputError: if there is none, or it is no JSON object.
    """
    name = "the standard input" if path == "-" else printable(path)
    try:
        text = _text(path, name)
    except OSError as error:
        raise InputError(f"{name} can't be read: {error.strerror or error}") from error
    except ValueError as error:  # UnicodeDecodeError; a NUL in the path
        raise InputError(f"{name} is not JSON: it is not text in UTF-8") from error
    try:
        values = json.loads(_plain_json(text, name), object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{name} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}{HINT}"
        ) from error
    except RecursionError as error:
        raise InputError(f"{name} is not JSON that can be read: its blocks are nested too deeply") from error
    except ValueError as error:
        raise InputError(f"{name} is not JSON that can be read: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{name} must hold a JSON object, DeepSpeed's config, got {type(values).__name__}")
    return Config(values, name)


def _text(path: str, name: str) -> str:
    def first_bytes(file: BinaryIO) -> bytes:
        content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise InputError(f"{name} must be a DeepSpeed config, got more than {LARGEST:,} bytes")
        return content

    if path == "-":
        stream: Any = sys.stdin
        content = first_bytes(stream.buffer) if hasattr(stream, "buffer") else stream.read().encode()
    else:
        with Path(path).open("rb") as file:
            content = first_bytes(file)
    return content.decode("utf-8-sig")


def _plain_json(text: str, name: str) -> str:
    """Remove comments and trailing commas; each character stays in its line and column."""

    def blank(found: re.Match[str]) -> str:
        matched = found.group()
        if found.group(1) is not None:
            return matched
        if matched.startswith("/*") and (len(matched) < 4 or not matched.endswith("*/")):
            line = text.count("\n", 0, found.start()) + 1
            raise InputError(f"{name} is not JSON: the comment that begins in line {line} has no end")
        return re.sub(r"[^\n]", " ", matched)

    return _LAST_COMMA.sub(blank, _COMMENT.sub(blank, text))


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {json.dumps(twice)} stands twice in one block; keep one")
    return values
