"""Prints in C what is declared elsewhere: the table's columns, rules, the arguments of kernels, kernels of one rule."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import torch

from .. import bit_rules, headers, matrix_rules, rules

HERE = Path(__file__).parent
_TYPES = {
    torch.float32: ("*fp32", "float"),
    torch.float64: ("*fp64", "double"),
    torch.uint8: ("*u8", "uint8_t"),
    torch.int8: ("*i8", "int8_t"),
    torch.int16: ("*i16", "int16_t"),
    torch.int32: ("*i32", "int32_t"),
    torch.uint32: ("*u32", "uint32_t"),
    torch.int64: ("*i64", "int64_t"),
}
"""Of pointers in Triton's signatures, and of what they point at in C."""
_NUMBERS = {"fp32": "float", "fp64": "double"}


class Spec(NamedTuple):
    """A tensor that an op takes."""

    dtype: torch.dtype | None  # None where it is float32 or bfloat16
    dense: bool = True  # along its last dimension
    others: tuple[torch.dtype, ...] = ()  # that it may be in besides

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Return those that it may have: words are bytes to callers."""
        dtype = torch.uint8 if self.dtype is torch.uint32 else self.dtype
        return ((dtype,) if dtype else (torch.float32, torch.bfloat16)) + self.others

    def is_dense(self, x: torch.Tensor) -> bool:
        """Tell whether a tensor's rows have no gaps, if they must not."""
        return not self.dense or not x.dim() or x.stride(-1) == 1 or x.shape[-1] <= 1

    @property
    def pointer(self) -> str:
        """Return it as Triton's signatures have it."""
        return _TYPES[self.dtype or torch.float32][0]


class Place(NamedTuple):
    """Where a kernel finds what is a field of a noun: in which argument, of which type, and under which name there."""

    argument: str
    noun: str
    field: str


class Parameter(NamedTuple):
    """An argument of a kernel: its type as Triton's signatures have it, ``constexpr``, or a pointer, ``*fp32``."""

    name: str
    kind: str
    spec: Spec | None = None
    written: bool = False
    place: Place | None = None

    @property
    def several(self) -> bool:
        """Tell whether a C kernel is told the dtype behind it: its place among those that it may have."""
        return self.spec is not None and len(self.spec.dtypes) > 1

    @property
    def in_c(self) -> list[str]:
        """Return it as C declares it; a noun's fields may be written, by any kernel that gets it."""
        const = "" if self.written or self.place else "const "
        if self.several:
            return [f"{const}void *{self.named}", f"int64_t {self.named}_kind"]
        if self.kind.startswith("*"):
            return [f"{const}{dict(_TYPES.values())[self.kind]} *{self.named}"]
        return [f"{_NUMBERS.get(self.kind, 'int64_t')} {self.named}"]

    @property
    def named(self) -> str:
        """Return what C calls it, in a noun by its field's name."""
        return self.place.field if self.place else self.name


def _arguments(parameters: Sequence[Parameter], value: str = "") -> str:
    """Return a kernel's arguments as C declares them, or, with a prefix of what is given, as they are handed over."""
    texts = []
    for place, group in itertools.groupby(parameters, lambda p: p.place and (p.place.argument, p.place.noun)):
        each = list(group)
        given = [f"{value}{n}" for p in each for n in ((p.name, f"{p.name}_kind") if p.several else (p.name,))]
        if place is None:
            texts += given if value else [text for p in each for text in p.in_c]
        elif value:
            texts.append(f"(struct {place[1]}){{{', '.join(given)}}}")
        else:
            texts.append(f"struct {place[1]} {place[0]}")
    return ", ".join(texts)


def _nouns(kernels: Iterable[Sequence[Parameter]]) -> Iterator[str]:
    """Print each noun as a struct."""
    known: dict[str, str] = {}
    for parameters in kernels:
        for place, group in itertools.groupby(parameters, lambda p: p.place and (p.place.argument, p.place.noun)):
            if place is not None:
                fields = "; ".join(text for p in group for text in p.in_c)
                assert known.setdefault(place[1], fields) == fields, f"{place[1]} has other fields in another kernel"
    for name, fields in known.items():
        yield f"struct {name} {{ {fields}; }};"


def header(kernels: Mapping[str, Sequence[Parameter]]) -> str:
    """Return the text of ``generated.h``."""
    columns = ", ".join(column.name for column in rules.Coef)
    of_groups = ", ".join(f"{column.name} = {column.value}" for column in rules.Group)
    layers = ", ".join(row.name for row in rules.Layer)
    words = ", ".join(word.name for word in headers.Word)
    flags = ", ".join(f"{flag.name} = {int(flag)}" for flag in headers.Flag)
    lines = [
        f"enum {{ {columns}, COLUMNS }}; /* of the table of coefficients */",
        f"enum {{ {of_groups}, GROUP_COLUMNS }}; /* of a group's row */",
        f"enum {{ {layers} }}; /* rows of a table of layers */",
        f"enum {{ {words}, WORDS, CHECKED = {headers.CHECKED} }}; /* of a message's header */",
        f"enum {{ {flags}, KNOWN = {headers.KNOWN}, PARTLY = {headers.PARTLY} }}; /* why a step is skipped */",
        *(line for each in (rules, bit_rules, matrix_rules) for line in _rules(inspect.getsource(each))),
    ]
    lines += _nouns(kernels.values())
    for name, parameters in kernels.items():
        lines.append(f"#define {name}_ARGUMENTS {_arguments(parameters)}")
    return "\n".join(lines) + "\n"


_THREADS = """/* Each kernel on several threads: those of torch's own operations, so that none spins while others work.
   Functions of the OpenMP that torch has loaded are given: another one would have threads of its own. */

#include "block_io.h"

static void (*parallel)(void (*part)(void *), void *given, unsigned threads, unsigned flags);
static int (*thread)(void), (*team)(void);

void use_threads(void *gomp_parallel, void *omp_get_thread_num, void *omp_get_num_threads)
{
    parallel = gomp_parallel;
    thread = omp_get_thread_num;
    team = omp_get_num_threads;
}
"""


def on_threads(kernels: Mapping[str, Sequence[Parameter]]) -> str:
    """Return a C file with ``NAME_on_threads`` for each kernel: behind threads and wanted programs, its arguments."""
    functions = [_THREADS]
    for name, parameters in kernels.items():
        flat = [parameter._replace(place=None, written=True) for parameter in parameters]
        declared = [text for parameter in flat for text in parameter.in_c]
        names = [n for p in parameters for n in ((p.name, f"{p.name}_kind") if p.several else (p.name,))]
        functions.append(
            f"""
KERNEL({name});

struct {name}_given {{ int64_t wanted; {"; ".join(declared)}; }};

static void {name}_of(const struct {name}_given *g, int64_t begin, int64_t end)
{{
    {name}(begin, end, {_arguments(parameters, "g->")});
}}

static void {name}_part(void *given)
{{
    const struct {name}_given *g = given;
    int64_t i = thread(), n = team();
    {name}_of(g, g->wanted * i / n, g->wanted * (i + 1) / n);
}}

void {name}_on_threads(int64_t threads, int64_t wanted, {", ".join(declared)})
{{
    struct {name}_given given = {{wanted, {", ".join(names)}}};
    if (threads < 2)
        {name}_of(&given, 0, wanted);
    else
        parallel({name}_part, &given, threads, 0);
}}
"""
        )
    return "".join(functions)


def instance(template: str, name: str, rule: Callable[..., Any]) -> str:
    """Return the C file of op ``name``: the rule, and a template with NAME and RULE filled in.

    Raises:
        TypeError: for a rule of other arguments or results, or that uses what ``rules`` does not have.
        NotImplementedError: for one that C can't be printed of.
    """
    used = inspect.getclosurevars(rule)
    known = {"rules": rules, **vars(rules)}
    unknown = [key for key, value in {**used.globals, **used.nonlocals}.items() if known.get(key) is not value]
    if unknown:
        raise TypeError(
            f"rule {rule.__name__} must be made of its arguments, numbers, tl, and what rules.py has, got {unknown}"
        )
    (written,) = ast.parse(dedent(inspect.getsource(rule))).body
    assert isinstance(written, ast.FunctionDef)
    results = [node.value for node in ast.walk(written) if isinstance(node, ast.Return)]
    if len(written.args.args) != 3 or not all(isinstance(r, ast.Tuple) and len(r.elts) == 2 for r in results):
        raise TypeError(f"rule {rule.__name__} must take m, g and k, and return two values, c and m")
    written.name = f"{name}_rule"  # no other function's
    text = (HERE / template).read_text().replace("NAME", name).replace("RULE", written.name)
    return "\n".join(['#include "block_io.h"', *_function(written), text])


# ---------------------------------------------------------------- formulas

_OPERATORS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.RShift: ">>",
    ast.LShift: "<<",
    ast.BitXor: "^",
    ast.BitAnd: "&",
    ast.GtE: ">=",
    ast.Gt: ">",
    ast.LtE: "<=",
    ast.Lt: "<",
    ast.NotEq: "!=",
    ast.Eq: "==",
}
_CALLS = {
    "where": "({} ? {} : {})",
    "sqrt": "sqrt({})",
    "sqrt_rn": "sqrtf({})",
    "minimum": "fmin({}, {})",
    "maximum": "fmax({}, {})",
    "to": "({})",  # what it is assigned to, or returned as, converts
    "to float32": "(float)({})",
    "div_rn": "({} / {})",
    "abs": "fabsf({})",
    "of": "{}[{}]",
}


def _rules(source: str) -> Iterator[str]:
    """Print each rule as an inline function; several results are a struct's. Those of k in float64 are for no C."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            yield f"#define {ast.unparse(node.targets[0])} {_expression(node.value)}"
        elif isinstance(node, ast.FunctionDef) and (_is_wide(node) or "float64" not in ast.dump(node)):
            yield from _function(node)


def _is_wide(rule: ast.FunctionDef) -> bool:
    """Tell whether a rule's numbers are float64: Python's float."""
    return any(isinstance(a.annotation, ast.Name) and a.annotation.id == "float" for a in rule.args.args)


def _function(rule: ast.FunctionDef) -> Iterator[str]:
    kinds = {argument.arg: _kind(argument.arg, argument.annotation) for argument in rule.args.args}
    arguments = ", ".join(f"{kind} {name}" for name, kind in kinds.items())
    results = [node.value for node in ast.walk(rule) if isinstance(node, ast.Return)]
    given = _kind("", rule.returns)
    value = given if given in ("uint32_t", "double") else "double" if "double" in kinds.values() else "float"
    if isinstance(results[0], ast.Tuple):
        names = ", ".join(f"x{i}" for i in range(len(results[0].elts)))
        given = f"struct {rule.name}"
        yield f"{given} {{ {value} {names}; }};"
    body = " ".join(_statements(rule.body, set(kinds), rule.name, value))
    if value == "double":
        body = re.sub(r"(\d)f\b", r"\1", body)  # its literals as well
    yield f"static inline {given} {rule.name}({arguments}) {{ {body} }}"


def _kind(name: str, annotation: ast.expr | None) -> str:
    if name == "k":
        return "const float *"
    if isinstance(annotation, ast.Name):
        return {"int": "uint32_t", "bool": "int32_t", "float": "double"}[annotation.id]
    return "int64_t" if isinstance(annotation, ast.Attribute) else "float"


def _statements(body: Sequence[ast.stmt], known: set[str], rule: str, kind: str) -> Iterator[str]:
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield f"{'' if name in known else kind + ' '}{name} = {_expression(node.value)};"
                known.add(name)
            case ast.Return(value=ast.Tuple(elts=values)):
                yield f"return (struct {rule}){{{', '.join(map(_expression, values))}}};"
            case ast.Return(value=ast.expr() as value):
                yield f"return {_expression(value)};"
            case ast.If():
                then, other = (" ".join(_statements(each, known, rule, kind)) for each in (node.body, node.orelse))
                yield f"if ({_expression(node.test)}) {{ {then} }} else {{ {other} }}"
            case ast.Expr(value=ast.Constant()):  # a docstring
                pass
            case _:
                raise NotImplementedError(f"{rule} cannot be printed in C: {ast.unparse(node)}")


def _expression(node: ast.expr) -> str:
    match node:
        case ast.BinOp(left=left, op=operator, right=right):
            return f"({_expression(left)} {_OPERATORS[type(operator)]} {_expression(right)})"
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return f"({_expression(left)} {_OPERATORS[type(operator)]} {_expression(right)})"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return f"(-{_expression(operand)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"(!{_expression(operand)})"
        case ast.Name(id=name):
            return name
        case ast.Constant(value=float() as value):
            return f"{value!r}f"
        case ast.Constant(value=int() as value):
            return str(int(value)) if value < 2**31 else f"{value}u"  # False is 0
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value="nan")]):
            return "NAN"
        case ast.Call(func=function, args=arguments):
            name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
            of = [function.value] if isinstance(function, ast.Attribute) and name == "to" else arguments
            values = [_expression(each) for each in of]
            if name == "to" and ast.unparse(arguments[0]) == "tl.float32":
                name = "to float32"
            if name in _CALLS:
                return _CALLS[name].format(*values)
            if hasattr(rules, name) or hasattr(bit_rules, name):
                return f"{name}({', '.join(values)})"
    raise NotImplementedError(f"it cannot be printed in C: {ast.unparse(node)}")
