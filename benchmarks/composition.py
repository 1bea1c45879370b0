"""Counts what a reader of an optimizer, and each of its steps, goes through; records it, so that it only shrinks.

``python -m benchmarks.composition`` prints today's numbers, each beside its goal, and exits with 1 where one is worse
than ``results/composition.json`` has it; ``--update`` writes today's numbers there. Counted are, by optimizer:

- attributes of instances, torch.optim.Optimizer's own left out: of the optimizer, and of each object of ours that is
  reachable from it but for transports; a NamedTuple is a value and has none;
- our classes in its MRO, the names that they define, and those that several of them define, ``__init__`` left out;
  the same of its algorithm;
- calls of our functions in the compressed step that needs fewest, which renews no variance: rank 0 of two simulated
  ranks, uncompiled, kernels in C. A generator counts once, and comprehensions, which newer Pythons inline, do not;
  neither does ``comm.simulated``, which stands in for a network.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import itertools
import subprocess
import sys
import types
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fusedonebit
from fusedonebit import OneBitAdam, OneBitLamb, ZeroOneAdam, policies, triton_kernels
from fusedonebit.comm import SimulatedGroup, simulated
from fusedonebit.comm.transport import CountingTransport
from fusedonebit.triton_kernels import nouns, using
from fusedonebit.triton_kernels.op import OPS

from .pages import RESULTS, ROOT
from .ratchet import Counted, Found, Numbers, main

LIBRARY = Path(fusedonebit.__file__).parent
NOT_THE_LIBRARY = ("apps", "deepspeed")
LONG = 450
"""Lines beyond which a file is long."""
FIRST_KERNEL = "momentum_compress"

RECORD = RESULTS / "composition.json"
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "OneBitAdam": (OneBitAdam, {"warmup": 2}),
    "OneBitLamb": (OneBitLamb, {"warmup": 2}),
    "ZeroOneAdam": (ZeroOneAdam, {"sync_policy": policies.EveryStep()}),
}
"""With their defaults, but for warm-ups, which are short, and for rounds, without which ZeroOneAdam is OneBitAdam."""
CLASSES = {each.__name__ for kind, _ in OPTIMIZERS.values() for each in (*kind.__mro__, *kind.kind.__mro__)} - {
    "object"
}
MORE = {"OneBitAdam": 1.0, "OneBitLamb": 1.25, "ZeroOneAdam": 1.25}
"""By which goals of an optimizer are multiplied."""
STEPS, WATCHED = 48, 8
"""Steps that are taken, and how many of the last are counted: some renew a variance, or tell of squares."""

OF_AN_OPTIMIZER = {
    "attributes": ("attributes of the optimizer", 25),
    "largest": ("attributes of the largest other object", 25),
    "attributes_of_all": ("attributes of all its objects", 110),
    "classes": ("our classes in its MRO", 2),
    "members": ("members of these", 40),
    "overridden": ("members that several define", 0),
    "classes_of_algorithm": ("classes in its algorithm's MRO", 2),
    "members_of_algorithm": ("members of these", 40),
    "overridden_of_algorithm": ("members that several define", 0),
    "calls_before": ("calls before the first op of a step", 35),
    "files_before": ("files of these", 9),
    "depth_before": ("greatest depth of these", 6),
    "calls": ("calls in a whole step", 150),
    "files": ("files of these", 16),
    "changes": ("changes of file in a whole step", 60),
}
"""What is counted of each optimizer: how the table calls it, and its goal."""
OF_THE_LIBRARY = {
    "op_arguments": ("most arguments of an op", 12),
    "kernel_arguments": ("most arguments of a kernel", 20),
    "noun_fields": ("most fields of a noun", 8),
    "reaching": ("functions that take an optimizer and reach into it", 15),
    "reached": ("attributes that these read", None),
    "naming": (f"files that name {FIRST_KERNEL}", 20),
    "lines": ("lines of the library", 20_000),
    "longest_file": ("lines of its longest file", LONG),
    "long_files": (f"files of more than {LONG} lines", 0),
    "same_names": ("names that files of several folders have", 0),
}
"""The same of the library: the package without applications, C included."""


# -------------------------------------------------------------------- objects and classes


def is_ours(kind: type[Any]) -> bool:
    return kind.__module__.split(".")[0] == "fusedonebit"


def attributes(thing: object) -> dict[str, Any]:
    """Return an instance's attributes, those in slots included."""
    found = dict(getattr(thing, "__dict__", {}))
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        names = [slots] if isinstance(slots, str) else slots
        found |= {name: getattr(thing, name) for name in names if not name.startswith("__") and hasattr(thing, name)}
    return found


def inside(thing: Any) -> Sequence[Any]:
    """Return what a container, a function or an object of ours holds."""
    held: list[Any] = []
    if isinstance(thing, Mapping):
        held += thing.values()
    elif isinstance(thing, (list, tuple, set, frozenset)):
        held += thing
    elif isinstance(thing, types.MethodType):
        held += [thing.__self__]
    elif isinstance(thing, types.FunctionType):
        held += inspect.getclosurevars(thing).nonlocals.values()
    elif isinstance(thing, functools.partial):
        held += [thing.func, *thing.args, *thing.keywords.values()]
    return [*held, *attributes(thing).values()] if is_ours(type(thing)) else held


def objects(optimizer: object) -> list[Any]:
    """Return all objects of ours that are reachable from an optimizer, itself first."""
    seen: dict[int, Any] = {}
    waiting = [optimizer]
    while waiting:
        thing = waiting.pop()
        if id(thing) not in seen and not isinstance(thing, (type, CountingTransport)):
            seen[id(thing)] = thing  # kept, so that nothing else comes to lie there
            waiting += inside(thing)
    return [thing for thing in seen.values() if is_ours(type(thing)) and not isinstance(thing, tuple)]


def of_objects(optimizer: torch.optim.Optimizer) -> tuple[Numbers, str]:
    """Count attributes; also return the name of the largest object's class."""
    torchs = vars(torch.optim.Optimizer([torch.nn.Parameter(torch.zeros(1))], {}))
    own = len(vars(optimizer).keys() - torchs.keys())
    sizes = [(len(attributes(thing)), type(thing).__name__) for thing in objects(optimizer)[1:]]
    largest, name = max(sizes)
    together = own + sum(size for size, _ in sizes)
    return {"attributes": own, "largest": largest, "attributes_of_all": together}, name


def of_classes(kind: type[Any]) -> Numbers:
    """Count an optimizer's classes and what they define: functions, properties and attributes."""
    ours = [each for each in kind.__mro__ if is_ours(each)]
    names = [
        name
        for each in ours
        for name, member in vars(each).items()
        if callable(member) or not (name.startswith("__") or name == "_abc_impl")  # the others are Python's own
    ]
    several = {name for name in names if names.count(name) > 1} - {"__init__"}
    return {"classes": len(ours), "members": len(set(names)), "overridden": len(several)}


# -------------------------------------------------------------------- a step


class Call(NamedTuple):
    """A function of ours that was called: its code, and how many of ours were under way, itself included."""

    code: types.CodeType
    depth: int


class Calls:
    """Notes the calls of this thread while it is entered."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._generators: dict[int, types.FrameType] = {}  # kept, so that no other frame comes to lie there

    def __enter__(self) -> Calls:
        gc.disable()  # finalizers would be called at any time
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _note(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event != "call" or not _counts(frame.f_code) or id(frame) in self._generators:
            return
        if frame.f_code.co_flags & inspect.CO_GENERATOR:  # resuming one is a call to profilers
            self._generators[id(frame)] = frame
        depth, caller = 0, frame
        while caller is not None:
            depth += _counts(caller.f_code)
            caller = caller.f_back  # type: ignore[assignment]
        self.calls.append(Call(frame.f_code, depth))


@functools.cache
def _counts(code: types.CodeType) -> bool:
    file = Path(code.co_filename)
    ours = LIBRARY in file.parents and file != Path(str(simulated.__file__))
    return ours and code.co_name not in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


def compressed_step(kind: Any, options: Mapping[str, Any]) -> tuple[Any, list[Call]]:
    """Take steps on two ranks; return the first one's optimizer and the calls of its shortest compressed step."""

    def rank(number: int, transport: Any) -> tuple[Any, list[Call]]:
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((16,), (8, 3))]
        optimizer, found = kind(params, 1e-3, **options, process_group=transport), []
        generator = torch.Generator().manual_seed(number)
        grads = [torch.empty_like(p) for p in params]
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        for step in range(STEPS):
            for grad in grads:  # in place: launches are planned for tensors that stay where they are
                grad.normal_(generator=generator)
            if step < STEPS - WATCHED:
                optimizer.step()
                continue
            with Calls() as noted:
                optimizer.step()
            found.append(noted.calls)
            assert optimizer.phase in ("compression", "one-bit"), optimizer.phase
        assert optimizer.stats()["skipped_steps"] == 0
        return optimizer, min(found, key=len)

    with using("native"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of so short a warm-up
        return SimulatedGroup(2).run(rank)[0]


def of_calls(calls: Sequence[Call]) -> Numbers:
    """Count calls, files and changes of file in a step, and what comes before its first op."""
    op = triton_kernels.finish.__code__  # the same of all ops
    before = calls[: next(i for i, call in enumerate(calls) if call.code is op)]
    files = [call.code.co_filename for call in calls]
    return {
        "calls_before": len(before),
        "files_before": len(set(files[: len(before)])),
        "depth_before": max(call.depth for call in before),
        "calls": len(calls),
        "files": len(set(files)),
        "changes": sum(one != other for one, other in itertools.pairwise(files)),
    }


# -------------------------------------------------------------------- the library


def of_ops() -> Numbers:
    """Count arguments and fields of those that have most; a noun is one argument."""
    kernels = [op.kernel for op in OPS.values()]
    written = [kernel.function.__globals__.get("of_nouns", kernel).function for kernel in kernels]  # not as launched
    taken = [noun.kind for op in OPS.values() for noun in op.signature._nouns.values()]
    declared = [each for each in vars(nouns).values() if isinstance(each, type) and hasattr(each, "_fields")]
    return {
        "op_arguments": max(len(op.signature.whole.parameters) for op in OPS.values()),
        "kernel_arguments": max(len(inspect.signature(function).parameters) for function in written),
        "noun_fields": max(len(noun._fields) for noun in (*taken, *declared)),
    }


def package_files(*suffixes: str) -> list[Path]:
    """Return the files of the package; two of its folders are links, into which ``rglob`` does not go."""
    folders = (LIBRARY, LIBRARY / "comm", LIBRARY / "triton_kernels")
    return sorted({path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes})


def library_files(*suffixes: str) -> list[Path]:
    return [path for path in package_files(*suffixes) if path.relative_to(LIBRARY).parts[0] not in NOT_THE_LIBRARY]


def reached(function: ast.FunctionDef | ast.AsyncFunctionDef, kinds: Collection[str]) -> set[str]:
    """Return the attributes that a function reads of optimizers that it takes."""
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    optimizers = set()
    for each in given:
        annotation = ast.walk(each.annotation) if each.annotation is not None else ()
        words = {getattr(node, "id", getattr(node, "attr", None)) for node in annotation}
        if (each.arg in ("optimizer", "keeper", "algorithm") and not words & {"str", "int"}) or words.intersection(
            kinds
        ):
            optimizers.add(each.arg)
    nodes = ast.walk(function) if optimizers else ()
    read = [(node.value, node.attr) for node in nodes if isinstance(node, ast.Attribute)]
    return {attribute for of, attribute in read if isinstance(of, ast.Name) and of.id in optimizers}


def of_functions(kinds: Collection[str]) -> Numbers:
    """Count functions that take an optimizer and read its attributes, and these attributes.

    It, or its algorithm, is taken by one of the names ``optimizer``, ``keeper`` and ``algorithm``, or by an annotation
    that names one of the classes ``kinds``.
    """
    trees = [ast.parse(path.read_text()) for path in library_files(".py")]
    functions = [n for tree in trees for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    found = [read for function in functions if (read := reached(function, kinds))]
    return {"reaching": len(found), "reached": len(set().union(*found))}


def of_files() -> tuple[Numbers, str]:
    """Count files and lines; also return the longest file's name. Without git nobody counts the repository's files."""
    here = str(Path(__file__).relative_to(ROOT))
    listed = subprocess.run(["git", "grep", "-l", FIRST_KERNEL], cwd=ROOT, capture_output=True, text=True)
    written = [name for name in listed.stdout.split() if name != here and not name.startswith("docs/tables/")]
    naming = {"naming": len(written)} if listed.returncode == 0 else {}
    lines = {path: len(path.read_text().splitlines()) for path in library_files(".py", ".c", ".h")}
    longest = max(lines, key=lambda path: lines[path])
    long = sum(count > LONG for count in lines.values())
    named = Counter(path.name for path in package_files(".py") if path.name != "__init__.py")
    numbers = {"lines": sum(lines.values()), "longest_file": lines[longest], "long_files": long}
    numbers["same_names"] = sum(count > 1 for count in named.values())
    return naming | numbers, str(longest.relative_to(LIBRARY))


# -------------------------------------------------------------------- the table and the record


def measure() -> Counted:
    """Count everything, by optimizer and for the library."""
    found: Found = {}
    remarks = []
    for name, (kind, options) in OPTIMIZERS.items():
        optimizer, calls = compressed_step(kind, options)
        of_all, largest = of_objects(optimizer)
        of_algorithm = {f"{key}_of_algorithm": number for key, number in of_classes(kind.kind).items()}
        found[name] = of_all | of_classes(kind) | of_algorithm | of_calls(calls)
        remarks.append(f"{name}'s largest other object is its {largest}.")
    files, longest = of_files()
    found["library"] = of_ops() | of_functions(CLASSES) | files
    names = {key: text for key, (text, _) in (OF_AN_OPTIMIZER | OF_THE_LIBRARY).items()}
    return Counted(found, [*table(found), *remarks, f"The longest file is {longest}."], names, {"lines": 100})


def table(found: Found) -> list[str]:
    """Lay it out; goals are in brackets."""
    rows = [f"{'':52}" + "".join(f"{name:>16}" for name in OPTIMIZERS)]
    for key, (text, goal) in OF_AN_OPTIMIZER.items():
        cells = [f"{found[name][key]:,} ({int(goal * MORE[name])})" for name in OPTIMIZERS]
        rows.append(f"{text:52}" + "".join(f"{cell:>16}" for cell in cells))
    for key, (text, most) in OF_THE_LIBRARY.items():
        number = f"{found['library'][key]:,}" if key in found["library"] else "-"
        rows.append(f"{text:52}{number + ('' if most is None else f' ({most:,})'):>16}")
    return rows


if __name__ == "__main__":
    main("Count what a step goes through.", measure, RECORD)
