"""Derives ops from one declaration each: the signature, what it writes, its kernel.

To add an op, write in one file:

1. the formulas, in ``rules``, if they are new;
2. the kernel, ``@jit() def name_kernel(...)``, whose arguments are bound by name:
   - an argument of the op; None where the caller leaves an optional tensor out. Of ``Words`` it is the same memory as
     32-bit words. A noun is read by its fields, its bools in capitals; outside of kernels and eager functions, here in
     ``derive`` and ``writes`` and in C, ``side.scale`` is ``side_scale``;
   - ``X_table``, of a list of tensors X the table of their addresses (``user_tensors.place_of``). No argument may be
     called ``params``, ``specialization`` or ``options``: Triton's launcher has variables of these names;
   - ``X_stride``, the first stride of tensor X, in its elements (of ``Words``, in quads of 16 bytes);
   - a constant in capitals: the op's bool or int of that name (``BLOCK_SIZE``), or, of a list of tensors, how they
     are stored (``user_tensors.load``);
   - one of ``STANDARD`` (``block_start``, ``blocks_per_chunk``, ...), or of the op's own ``derive``, which maps a name
     to its type and to a function whose arguments are bound in the same way. ``programs`` is the grid, by default
     ``blocks``; ``num_warps`` is Triton's;
   - a float arrives in float32, as Python's times a float32 tensor counts in torch; where the eager function computes
     in float64 with it, the kernel's argument is annotated with ``tl.float64``;
3. the eager op, which specifies it: ``@op(name_kernel, writes=(...))`` on a function with the annotations of
   ``nouns``. They say of which dtypes and shapes tensors are, ``Annotated[Doubles, "2 B | 3 B"]`` (``checks``); who
   gives others is told which argument of which op is wrong, by the fake implementation, and where a launch is planned
   or the eager function called;
4. if CPUs need it fast, ``KERNEL(name) {...}`` in one of ``native``'s C files: its arguments are those of the Triton
   kernel, printed from this declaration (``native.generate``), behind the range of programs;
5. its name in ``__init__``, what arguments may be in ``tests/op_rules``.

An op in which workers vote needs a rule alone: ``vote.vote_op``.

The decorated function becomes the op ``torch.ops.fusedonebit.<name>``, which ``torch.compile`` sees as opaque and
mutating what the declaration says. It is registered through ``torch.library.Library``: the decorator ``custom_op``
imports Dynamo at its first call (over a second) and costs four times as much at every later one.
"""

from __future__ import annotations

import ctypes
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from itertools import compress
from typing import Any, NamedTuple, ParamSpec
from weakref import ref

import torch
from torch import Tensor
from torch._C import _increment_version, _len_torch_dispatch_stack
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import _profiler_enabled

from . import backends, native
from .backends import chosen
from .checks import Checks
from .flattening import REQUIRED, Signature
from .jit import Deferred, interpreting
from .layout import BLOCK_SIZES
from .native.generate import Parameter
from .nouns import Derived, stride
from .tables import BlockTables, Facts, Listed, block_tables, pointer_table

NUM_WARPS = 4
P = ParamSpec("P")


def _per_chunk(blocks: int, packed: Tensor) -> int:
    if blocks < len(packed):
        raise ValueError(f"live_row must have a block for each chunk at least, got {blocks} blocks")
    return blocks // len(packed)


STANDARD: Derived = {
    "blocks": ("i32", lambda live_row: len(live_row)),
    "programs": ("i32", lambda blocks: blocks),
    "num_warps": ("i32", lambda: NUM_WARPS),
    "blocks_per_chunk": ("i32", _per_chunk),
    "plane": ("i32", lambda packed: packed.stride(-2)),  # bytes between the planes of bits, where TERNARY
    "TERNARY": ("constexpr", lambda packed: packed.dim() == 3),
    "tables": ("", block_tables),
    "block_start": ("*i32", lambda tables: tables.start),  # which of its tensor's blocks each is
    "block_tensor": ("*i32", lambda tables: tables.tensor),
    "live": ("*u8", lambda tables: tables.live.bits),
    "live_row": ("*i32", lambda tables: tables.live.row),
    "inside": (
        "*u8",
        lambda tables: tables.live.bits,
    ),  # the same where an op has masks of its own: only padding is out
    "inside_row": ("*i32", lambda tables: tables.live.row),
}


launches: Counter[str] = Counter()
"""Launches of each kernel in this process."""
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_DIRECT = _PLAIN | {list, tuple, Listed, int, float, bool, type(None)}
"""Types of arguments that need no dispatcher: subclasses of tensors may have no memory, or do otherwise."""


class Plan(NamedTuple):
    """A launch as it was bound, for arguments that lie where they did; it keeps none of them, but their tables.

    Attributes:
        sizes: Of the layout, for which it holds.
        fits: Tells whether tensors, each given once, are like those that it was bound with: of their types, dtypes,
            layouts, devices, shapes and strides; where gradients are enabled, both times, also whether they require
            them. torch's compiler makes one of its guards of this.
        tables: Of the layout, whose addresses it has, while somebody keeps them.
        pointers: Tables of lists of tensors, whose addresses it has.
        start: Starts it, on the arguments of the kernel.
        given: These: addresses, numbers and constants.
        free: Places in ``given`` of numbers that may be others each time, and their places among the op's arguments.
    """

    sizes: tuple[int, ...]
    fits: Callable[..., bool]
    tables: ref[BlockTables] | None
    pointers: list[Tensor]
    start: Callable[..., None]
    given: list[Any]
    free: list[tuple[int, int]]


_MOST_PLANS = 256
"""Of an op: more than most runs have buckets, and few enough that none fills much memory."""


class Op:
    """What is derived from a declaration."""

    def __init__(self, eager: Callable[..., None], kernel: Deferred, writes: Sequence[str], derive: Derived):
        signature = Signature(eager)
        self.name, self.kernel = eager.__name__.lstrip("_"), signature.kernel(kernel)
        self.eager, self.signature, self.arguments = signature.regrouped(eager), signature, signature.slots
        self.writes, self._derive = [name.replace(".", "_") for name in writes], derive
        defaults = [slot.default for slot in self.arguments.values()]
        required = max((i + 1 for i, default in enumerate(defaults) if default is REQUIRED), default=0)
        self._defaults, self._required = tuple(defaults), required
        self._lists = [name for name, argument in self.arguments.items() if argument.schema == "Tensor[]"]
        self._steps: dict[str, tuple[Callable[..., Any], list[str]]] = {}
        self._plans: dict[tuple[Any, ...], Plan] = {}
        declared = inspect.signature(self.kernel.function).parameters
        self._wide = {name for name, p in declared.items() if p.annotation == "tl.float64"}
        names = list(declared)
        self.parameters = [self._parameter(name) for name in names]
        self._launched = [self._key(name) for name in (*names, "device", "programs", "num_warps")]
        self._prepare_plans(names)
        # Parameters that have changed may be handed on in a step that is skipped, and are then not read.
        self._checks = Checks(self.name, self.arguments, [n for n in self._lists if n not in (*self.writes, "params")])

    def _prepare_plans(self, names: Sequence[str]) -> None:
        """Note at which places of the arguments is what a plan depends on."""
        needed = {name for _, names in self._steps.values() for name in names}
        places = {name: i for i, name in enumerate(self.arguments)}
        schemas = [argument.schema for argument in self.arguments.values()]
        self._device_at = schemas.index("Tensor")
        self._sizes_at = schemas.index("SymInt[]") if "SymInt[]" in schemas else None
        self._lists_at = [places[name] for name in self._lists]
        self._written_at = [places[name] for name in self._lists if name in self.writes]
        numbers = {name for name, argument in self.arguments.items() if argument.schema in ("int", "float", "bool")}
        # Numbers that a kernel is given as they are: all others decide how it is launched.
        self._free = [(i, places[name]) for i, name in enumerate(names) if name in numbers - needed - set(self._steps)]
        free = {at for _, at in self._free}
        self._fixed = [name in numbers and at not in free for name, at in places.items()]
        self._whole = [at in free and schema == "int" for at, schema in enumerate(schemas)]

    @property
    def schema(self) -> str:
        """Return it as ``torch.library`` has it."""
        texts = []
        for i, (name, slot) in enumerate(self.arguments.items()):
            kind = slot.schema
            if name in self.writes:
                kind = kind.replace("Tensor", f"Tensor({chr(ord('a') + self.writes.index(name))}!)")
            texts.append(f"{kind} {name}" + (f"={slot.default}" if i >= self._required else ""))
        return f"({', '.join(texts)}) -> ()"

    # ------------------------------------------------------------ binding

    def _key(self, name: str) -> str:
        """Return where ``bind`` leaves the value of a kernel's argument; note how it is computed."""
        if name in self._steps:
            return name
        lower = name.lower()
        if name in self._derive:
            return self._computed(name, self._derive[name][1])
        if name in self.signature.derived:
            _, function, fields = self.signature.derived[name]
            return self._computed(name, function, [self._key(field) for field in fields])
        if name == "device":
            given = [n for n, argument in self.arguments.items() if argument.schema == "Tensor"]
            return self._computed(name, lambda tensor: tensor.device, given[:1])
        if name == "packed":
            given = [n for n in ("exp_avg_bits", "arrived_bits", "bits") if n in self.arguments]
            return self._computed(name, lambda bits: bits, given[:1])
        if (of := name.removesuffix("_table")) != name and of in self._lists:
            return self._computed(name, lambda pointers: pointers.table, [self._pointers(of)])
        if lower in self._lists:
            return self._computed(name, lambda pointers: pointers.stored, [self._pointers(lower)])
        if name == "tensors":
            return self._computed(name, len, self._lists[:1])
        if name.endswith("_stride"):
            return self._computed(name, stride, [self._key(name.removesuffix("_stride"))])
        if name in self.arguments:
            spec = self.arguments[name].spec
            if spec is not None and spec.dtype is torch.uint32:
                return self._computed(f"{name}.words", _words, [name])
            return name
        if lower in self.arguments:
            return lower
        return self._computed(name, STANDARD[name][1])

    def _computed(self, key: str, function: Callable[..., Any], needed: Sequence[str] | None = None) -> str:
        if key not in self._steps:
            if needed is None:  # those of its own arguments that are derived come first
                names = inspect.signature(function).parameters
                as_given = set(self.arguments) - (set(self._derive) - {key})
                needed = [n if n in as_given else self._key(n) for n in names]
            self._steps[key] = function, list(needed)
        return key

    def _pointers(self, name: str) -> str:
        return self._computed(f"{name}.pointers", pointer_table, [name, self._key("device")])

    def _parameter(self, name: str) -> Parameter:
        argument, spec, place = self.arguments.get(name), None, self.signature.places.get(name)
        derived: Mapping[str, Sequence[Any]] = {**STANDARD, **self.signature.derived, **self._derive}
        if argument is not None and argument.spec is not None:
            kind, spec = argument.spec.pointer, argument.spec
        elif name.removesuffix("_table") in self._lists:
            kind = "*i64"
        elif argument is not None and argument.schema == "float":
            kind = "fp64" if name in self._wide else "fp32"
        elif argument is None and name in derived:
            kind = derived[name][0]
        else:  # a constant, a number, a stride, or the number of tensors
            kind = "constexpr" if name.isupper() else "i32"
        return Parameter(name, kind, spec, name in self.writes, place)

    def bind(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """Return the op's arguments and all that the kernel needs of them, by name."""
        values = dict(zip(self.arguments, arguments, strict=True))
        for key, (function, needed) in self._steps.items():
            values[key] = function(*[values[name] for name in needed])
        return values

    # ------------------------------------------------------------ running

    def run(self, *arguments: Any) -> None:
        """Run what is chosen for the device of the tensors; ``torch.library`` calls it, without defaults at the end.

        One function, as each call costs: it looks for a plan by all that may differ, and launches by it.
        """
        arguments = (*arguments, *self._defaults[len(arguments) :])
        device: torch.device = arguments[self._device_at].device
        stream: int | None = 0
        if device.type == "cuda":
            if device.index != torch.cuda.current_device():  # on which Triton launches
                with torch.cuda.device(device):
                    self.run(*arguments)
                return
            # Tables may be uploaded in a capture, and again in each replay: no plan is for one.
            stream = None if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream().cuda_stream
        on, types = backends.forced or device.type, tuple(map(type, arguments))
        tensors = tuple(compress(arguments, map(_PLAIN.__contains__, types)))
        each = dict(zip(map(id, tensors), tensors, strict=True))
        sizes = () if self._sizes_at is None else tuple(arguments[self._sizes_at])
        key = [on, stream, types, len(each), *map(Tensor.data_ptr, tensors), *compress(arguments, self._fixed)]
        for at in self._lists_at:
            key.append(x.facts.key if type(x := arguments[at]) is Listed else Facts(x).key)
        if on in ("triton", "cuda"):  # whose launcher compiles for what is true of a whole number
            key += [(n == 1, n % 16 == 0, -(2**31) <= n < 2**31) for n in compress(arguments, self._whole)]
        plan = self._plans.get(where := tuple(key))
        if (
            plan is not None
            and plan.sizes == sizes
            and plan.fits(*each.values())
            and (plan.tables is None or plan.tables() is not None)
        ):
            launches[self.name] += 1
            given = plan.given.copy()
            for i, at in plan.free:
                given[i] = arguments[at]
            plan.start(*given)
        else:
            self._checks(arguments)  # those that fit a plan are like those of which it was made
            backend = chosen(device.type)
            if backend == "plain" or (backend == "native" and self.name not in native.KERNELS):
                self.eager(*arguments)
                return
            launch = self.launch(arguments, backend)
            if launch is not None and stream is not None and _DIRECT.issuperset(types):
                if len(self._plans) >= _MOST_PLANS:
                    self._plans.clear()
                guards = TensorGuards(*each.values(), dynamic_dims_sizes=None, dynamic_dims_strides=None)
                self._plans[where] = Plan(sizes, guards.check, *launch)
        for at in self._written_at:  # through their addresses, which autograd does not see
            _increment_version(arguments[at])

    def fake(self, *arguments: Any) -> None:
        """Check arguments alone: nothing is returned, so there is no shape to infer."""
        self._checks((*arguments, *self._defaults[len(arguments) :]))

    def launch(self, arguments: Sequence[Any], on: str) -> tuple[Any, ...] | None:
        """Bind and launch the kernel, Triton's or that in C, and count it.

        Return what does so again (``Plan``), unless it would reach other memory than arguments and tables.
        """
        values = self.bind(arguments)
        launches[self.name] += 1
        *given, _, programs, num_warps = [values[key] for key in self._launched]
        start: Callable[..., None] | None
        if on == "native":
            functions = native.library()
            assert functions is not None
            kernel = functions[self.name]
            addresses = kernel.addresses(given, values.get("block_size", BLOCK_SIZES[0]))
            free = [(kernel.places[i], at) for i, at in self._free]
            start = partial(kernel.start, programs)
            start(*addresses)
        else:
            if interpreting():  # its interpreter takes what its launcher would narrow
                kinds = [p.kind for p in self.parameters]
                given = [ctypes.c_float(x).value if kind == "fp32" else x for x, kind in zip(given, kinds, strict=True)]
            # A fused multiply-add would round once where rules round twice.
            compiled = self.kernel.triton[(programs,)](*given, num_warps=num_warps, enable_fp_fusion=False)
            start = None if compiled is None else compiled[(programs, 1, 1)]  # None of Triton's interpreter
            addresses, free = [x.data_ptr() if isinstance(x, Tensor) else x for x in given], self._free
        tables = values.get("tables")
        pointers = [values[f"{name}.pointers"].table for name in self._lists]
        kept = [*pointers, *(x for x in arguments if isinstance(x, Tensor)), *([] if tables is None else tables.made())]
        memory = {tensor.untyped_storage().data_ptr() for tensor in kept}
        if start is None or any(x.untyped_storage().data_ptr() not in memory for x in given if isinstance(x, Tensor)):
            return None
        return None if tables is None else ref(tables), pointers, start, addresses, free

    def is_direct(self, arguments: Sequence[Any]) -> bool:
        """Tell whether the dispatcher would only pass these arguments on: nobody follows, and all are plain."""
        if (
            torch.compiler.is_compiling()
            or _len_torch_dispatch_stack()
            or _profiler_enabled()
            or len(arguments) != len(self.arguments)
            or not _DIRECT.issuperset(map(type, arguments))
            or arguments[self._device_at].device.type not in ("cpu", "cuda")
        ):
            return False
        for at in self._lists_at:
            if type(x := arguments[at]) is not Listed and not _PLAIN.issuperset(map(type, x)):
                return False
        return True


def _words(bits: Tensor) -> Tensor:
    """uint8 [n, 4 m] as uint32 [n, m], the same memory."""
    words = bits.view(torch.uint32)
    if words.stride(0) % 4 or words.shape[-1] % 4:
        raise ValueError(f"packed bits must have rows of a multiple of 16 bytes, got {bits.stride(0)}")
    return words


OPS: dict[str, Op] = {}
"""Every op that was declared, by name."""
_LIBRARY = torch.library.Library("fusedonebit", "DEF")


def op(
    kernel: Deferred, *, writes: Sequence[str], derive: Derived | None = None, in_c: str = ""
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Declare an op by its eager function; see the module's docstring.

    Args:
        kernel: In Triton.
        writes: The arguments that it changes.
        derive: Arguments of the kernel of this op alone: their types in Triton's notation, and how they are computed.
        in_c: Its C file where that is printed (``native.generate``); else it may be in one of ``native``'s.
    """

    def declare(eager: Callable[P, None]) -> Callable[P, None]:
        declared = Op(eager, kernel, tuple(writes), derive or {})
        OPS[declared.name] = declared
        _LIBRARY.define(declared.name + declared.schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):  # ROCm's tensors are CUDA tensors to torch
            _LIBRARY.impl(declared.name, declared.run, key)
        torch.library.register_fake(f"fusedonebit::{declared.name}", declared.fake, lib=_LIBRARY)
        native.declare(declared.name, declared.parameters, in_c)
        overload, flatten = getattr(torch.ops.fusedonebit, declared.name).default, declared.signature.flat

        @wraps(eager)
        def call(*arguments: P.args, **named: P.kwargs) -> None:
            flat = flatten(*arguments, **named)
            if declared.is_direct(flat):
                declared.run(*flat)
            else:
                overload(*flat)

        return call

    return declare
