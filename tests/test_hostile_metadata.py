"""Whatever ``.metadata`` says: it is refused with one error, or what is loaded is what was saved; nothing else happens.

Real metadata is changed in its bytes, in its opcodes and in its values; the checksum behind it is made right again, as
whoever means harm would do.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import everything, make_network, write_folder
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from observe import fingerprint
from ranks import run_ranks
from torch.distributed.checkpoint import filesystem, metadata

from fusedonebit import CheckpointError, dcp
from fusedonebit.checkpoint.metadata import read
from fusedonebit.checkpoint.storage import CheckedReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one rank alone

SEAL = len("\nfusedonebit crc32 01234567\n")
NAMES = (*metadata.__all__, "_MEM_FORMAT_ENCODING")
CLASSES = [getattr(metadata, name) for name in NAMES] + [filesystem._StorageInfo, filesystem.FileSystem, Path]
CLASSES += [torch.Size, type(Path()), type(torch.serialization._get_layout), metadata._MEM_FORMAT_ENCODING]


def attributes() -> list[dict[str, Any]]:
    """What BUILD could have changed in this process."""
    return [dict(vars(kind)) for kind in CLASSES] + [dict(vars(torch.serialization._get_layout))]


class Saved:
    """A checkpoint that two ranks wrote, whose metadata can be replaced."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "saved"
        run_ranks(write_folder, 2, str(self.folder))
        self.pickle = (self.folder / ".metadata").read_bytes()[:-SEAL]
        self.files = sorted(path.name for path in self.folder.glob("*.distcp"))
        self.ends = [at for _, _, at in pickletools.genops(self.pickle)][1:]
        outside = root / "outside.distcp"
        outside.write_bytes((self.folder / self.files[0]).read_bytes())  # that its checksums are right is no excuse
        (self.folder / "link.distcp").symlink_to(outside)
        (self.folder / "zeros.distcp").symlink_to("/dev/zero")
        os.mkfifo(self.folder / "pipe.distcp")
        self.paths = [str(outside), "../outside.distcp", "link.distcp", "zeros.distcp", "pipe.distcp", "/dev/zero", "."]
        self.paths += ["sub/../../outside.distcp", "nothing.distcp", "a\0b", "C:\\x", "\\\\host\\x", "x" * 5000, ""]
        self.loaded = self.load(self.pickle)
        assert isinstance(self.loaded, list)

    def load(self, data: bytes, sealed: bool = True) -> Any:
        """What a new model and optimizer have after the load, or the error."""
        (self.folder / ".metadata").write_bytes(
            data + f"\nfusedonebit crc32 {zlib.crc32(data):08x}\n".encode() * sealed
        )
        model, optimizer = make_network()
        before = self._all(model, optimizer)
        try:
            dcp.load(model, optimizer, self.folder)
        except ValueError as error:
            assert self._all(model, optimizer) == before
            return error
        return self._all(model, optimizer)

    def _all(self, model: Any, optimizer: Any) -> list[Any]:
        return [everything(optimizer), fingerprint(list(model.parameters()))]

    def refused_or_equal(self, data: bytes, sealed: bool = True) -> str:
        """The error's text, or "" if all was loaded as it was saved; nothing else may be, or have happened."""
        before = attributes()
        found = self.load(data, sealed)
        assert attributes() == before
        if isinstance(found, list):
            assert found == self.loaded
            return ""
        assert str(found)
        assert "\n" not in str(found)
        return str(found)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("hostile"))


# ---------------------------------------------------------------- bytes and opcodes


def text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


def built(target: bytes, **state: bytes) -> bytes:
    """BUILD on whatever ``target`` pushes, with plain attributes and, in a pair, with ``setattr``."""
    pairs = pickle.MARK + b"".join(text(key) + value for key, value in state.items()) + pickle.SETITEMS
    return target + pickle.NONE + pickle.EMPTY_DICT + pairs + pickle.TUPLE2 + pickle.BUILD


TORCHS, PATHS = "torch.distributed.checkpoint.metadata", ("pathlib", "PosixPath")
SNIPPETS = {
    "BUILD on a class": built(named(TORCHS, "MetadataIndex"), __hash__=pickle.NONE),
    "BUILD on Path": built(named(*PATHS), __fspath__=named("torch", "Size")),
    "BUILD on a function": built(named("torch.serialization", "_get_layout"), cache=pickle.EMPTY_DICT),
    "BUILD on an enumeration": built(named(TORCHS, "_MEM_FORMAT_ENCODING"), evil=pickle.NONE),
    "REDUCE of os.system": named("posix", "system") + text("touch evil") + pickle.TUPLE1 + pickle.REDUCE,
    "REDUCE of eval": named("builtins", "eval") + text("1") + pickle.TUPLE1 + pickle.REDUCE,
    "getattr of a module": named("builtins", "getattr") + named("os", "path") + text("x") + b"\x86R",
    "getattr of a class": named("builtins", "getattr") + named(*PATHS) + text("home") + pickle.TUPLE2 + pickle.REDUCE,
    "getattr of a method": named("builtins", "getattr")
    + named(TORCHS, "_MEM_FORMAT_ENCODING")
    + text("mro")
    + b"\x86R",
    "a name with dots": named("torch", "serialization.os.system") + text("touch evil") + pickle.TUPLE1 + pickle.REDUCE,
    "GLOBAL": b"cposix\nsystem\n" + text("touch evil") + pickle.TUPLE1 + pickle.REDUCE,
    "INST": pickle.MARK + text("touch evil") + b"iposix\nsystem\n",
    "NEWOBJ of a path": named(*PATHS) + text("/") + pickle.TUPLE1 + pickle.NEWOBJ,
    "an extension": b"\x82\x01",
    "a persistent id": text("x") + b"Q",
    "a huge memo": b"Nr\xff\xff\xff\x7f",
    "a huge frame": pickle.FRAME + b"\xff" * 8,
    "a huge text": pickle.BINUNICODE8 + b"\xff" * 7 + b"\x7f",
    "a huge text of 4 bytes": pickle.BINUNICODE + b"\xff" * 4,
    "huge bytes": pickle.BINBYTES8 + b"\xff" * 7 + b"\x7f",
    "a huge number": pickle.LONG4 + b"\xff\xff\xff\x7f",
    "digits": b"L" + b"9" * 5000 + b"L\n",
    "a deep tuple": b"N" + pickle.TUPLE1 * 100_000,
    "a deep tuple's hash": b"}N" + pickle.TUPLE1 * 100_000 + b"Ns",
    "doubled 60 times": b"N\x94" + b"".join(bytes([*b"h", i, *b"h", i, *b"\x86\x94"]) for i in range(60)),
    "a list in itself": b"]\x94h\x00a",
}


def snippet_at(saved: Saved, snippet: bytes, at: int) -> bytes:
    return saved.pickle[:at] + snippet + saved.pickle[at:]


def test_opcodes_that_metadata_does_not_need_are_refused(saved, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, snippet in SNIPPETS.items():
        message = saved.refused_or_equal(snippet_at(saved, snippet, saved.ends[len(saved.ends) // 2]))
        print(f"{name}: {message}")
        assert message.startswith(".metadata ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in SNIPPETS if "huge" in name])
def test_reading_costs_what_the_bytes_that_are_there_do(saved, name):
    """In calls and in memory: the time of a test says little."""
    data = snippet_at(saved, SNIPPETS[name], saved.ends[-2])
    (saved.folder / ".metadata").write_bytes(data)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    tracemalloc.start()
    sys.setprofile(count)
    try:
        with pytest.raises(ValueError, match=r"\.metadata is damaged"):
            CheckedReader(saved.folder).read_metadata()
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    print(f"{name}: {len(data)} bytes, {calls} calls, {peak} bytes of memory")
    assert calls < 20 * len(data)
    assert peak < 200 * len(data)


# ---------------------------------------------------------------- values


def entries(found: Any) -> list[Any]:
    return list(found.storage_data.values())


def tensors(found: Any) -> list[Any]:
    return [entry for entry in found.state_dict_metadata.values() if hasattr(entry, "chunks")]


def split(found: Any) -> Any:
    return next(entry for entry in tensors(found) if len(entry.chunks) > 1)


def only_one_is_summed_up(found: Any) -> None:
    vars(entries(found)[0]).pop("crc32", None)


def one_name_for_two(found: Any) -> None:
    a, b = (name for name in found.state_dict_metadata if name in ("model.0.bias", "model.2.bias"))
    found.state_dict_metadata[a] = found.state_dict_metadata.pop(b)


def a_hole(found: Any) -> None:
    split(found).chunks.pop()


def a_piece_twice(found: Any) -> None:
    chunks = split(found).chunks
    chunks[1] = chunks[0]


def bytes_of_another(found: Any) -> None:
    a, b = entries(found)[:2]
    vars(a).update(vars(b))


def changed(kind: str, name: str, value: Any) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        target = {"entry": entries, "tensor": tensors, "metadata": lambda found: [found]}[kind](found)[0]
        setattr(target, name, value)

    return change


HUGE = [-1, True, 1.0, "7", None, [], (), 2**31, 2**63, 2**70, -(2**70)]
VALUES: list[Callable[[Any], None]] = [only_one_is_summed_up, one_name_for_two, a_hole, a_piece_twice, bytes_of_another]
VALUES += [changed("entry", name, value) for name in ("offset", "length", "crc32", "relative_path") for value in HUGE]
VALUES += [changed("entry", "transform_descriptors", value) for value in (["zstd"], "zstd", [None], {"a": 1})]
VALUES += [changed("tensor", name, value) for name in ("size", "chunks", "properties") for value in (None, [], [None])]
VALUES += [changed("tensor", "size", torch.Size(size)) for size in ((2**62,), (2**40, 2**40), (0,), (1,) * 70)]
VALUES += [changed("metadata", "storage_data", value) for value in (None, {}, [], {"x": None})]
VALUES += [changed("metadata", "state_dict_metadata", value) for value in (None, {}, [], {"optimizer.x": 1})]


def with_values(saved: Saved, changes: list[Callable[[Any], None]]) -> bytes:
    found = pickle.loads(saved.pickle)
    for change in changes:
        change(found)
    return pickle.dumps(found)


@pytest.mark.parametrize("nested", [b"]", b"("], ids=["lists", "marks"])
def test_metadata_nested_too_deeply_is_refused_at_once(nested):
    with pytest.raises(CheckpointError, match=r"at byte 163\d\d of 1000002: .*nested so deeply"):
        read(b"\x80\x04" + nested * 1_000_000)


def test_values_that_can_not_be_are_refused(saved):
    for change in VALUES:
        assert saved.refused_or_equal(with_values(saved, [change]))


def test_no_file_but_the_folders_own_is_read(saved):
    for path in saved.paths:
        message = saved.refused_or_equal(with_values(saved, [changed("entry", "relative_path", path)]))
        print(f"{path[:40]!r}: {message}")
        assert message


def test_a_url_of_a_folder_is_that_folder(saved):
    saved.load(saved.pickle)
    model, optimizer = make_network()
    dcp.load(model, optimizer, f"file://{saved.folder}")
    assert saved._all(model, optimizer) == saved.loaded
    saved.load(with_values(saved, [changed("entry", "relative_path", "link.distcp")]))
    with pytest.raises(ValueError, match=r"link\.distcp must be a regular file of"):
        dcp.load(*make_network(), f"file://{saved.folder}")


def enormous(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)  # which takes no room


def test_metadata_must_be_a_regular_file_of_bounded_size(saved, tmp_path):
    for i, (make, text) in enumerate(
        [
            (os.mkfifo, "must be a regular file of"),
            (lambda path: path.symlink_to("/dev/zero"), "must be a regular file of"),
            (lambda path: path.symlink_to(saved.folder / ".metadata"), "must be a regular file of"),
            (enormous, "must have at most 1073741824 bytes"),
        ]
    ):
        folder = tmp_path / str(i)
        folder.mkdir()
        make(folder / ".metadata")
        with pytest.raises(ValueError, match=text):
            dcp.load(*make_network(), folder)


# ---------------------------------------------------------------- at random

AT = st.integers(0, 10**6)
FLIPS = st.lists(st.tuples(AT, st.integers(1, 255)), min_size=1, max_size=6)
SPLICES = st.lists(st.tuples(AT, st.integers(1, 60), AT, st.booleans()), min_size=1, max_size=3)


KINDS = ("flips", "splices", "snippets", "values", "paths")


@st.composite
def hostile(draw: st.DrawFn, kind: str) -> Callable[[Saved], bytes]:
    """Returns what makes hostile metadata of that of a checkpoint."""
    flips, splices, at = draw(FLIPS), draw(SPLICES), draw(AT)
    snippet, path = draw(st.sampled_from(sorted(SNIPPETS))), draw(AT)
    changes = draw(st.lists(st.sampled_from(range(len(VALUES))), min_size=1, max_size=2))

    def make(saved: Saved) -> bytes:
        data = bytearray(saved.pickle)
        if kind == "flips":
            for where, bits in flips:
                data[where % len(data)] ^= bits
        elif kind == "splices":  # opcodes over or between others
            for start, count, to, over in splices:
                a, b = start % len(saved.ends), to % len(saved.ends)
                piece = saved.pickle[saved.ends[a] : saved.ends[min(a + count, len(saved.ends) - 1)]]
                data[saved.ends[b] : saved.ends[b] + len(piece) * over] = piece
        elif kind == "snippets":
            where = saved.ends[at % len(saved.ends)]
            data[where:where] = SNIPPETS[snippet]
        elif kind == "values":
            return with_values(saved, [VALUES[which] for which in changes])
        else:
            change = changed("entry", "relative_path", saved.paths[path % len(saved.paths)])
            return with_values(saved, [change])
        return bytes(data)

    return make


@pytest.mark.long(but=1)
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_files_are_refused_or_loaded_as_they_were_saved(saved, monkeypatch, tmp_path, kind):
    """60 of each kind: 300."""
    monkeypatch.chdir(tmp_path)
    refused = []

    @settings(max_examples=60, phases=[Phase.generate])
    @given(make=hostile(kind), sealed=st.booleans())
    def load(make: Callable[[Saved], bytes], sealed: bool) -> None:
        refused.append(bool(saved.refused_or_equal(make(saved), sealed)))

    load()
    print(f"{kind}: {sum(refused)} of {len(refused)} hostile files refused, the others loaded as saved")
    assert len(refused) >= 60
    assert list(tmp_path.iterdir()) == []
