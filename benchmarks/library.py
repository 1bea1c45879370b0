"""Counts what the library has: files and lines, arguments of ops, functions that reach into an optimizer."""

from __future__ import annotations

import ast
import inspect
import subprocess
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import fusedonebit
from fusedonebit.triton_kernels import nouns
from fusedonebit.triton_kernels.op import OPS

from .ratchet import Numbers

ROOT = Path(__file__).parent.parent
LIBRARY = Path(fusedonebit.__file__).parent
NOT_THE_LIBRARY = ("apps", "deepspeed")
LONG = 450
"""Lines beyond which a file is long."""
FIRST_KERNEL = "momentum_compress"


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
