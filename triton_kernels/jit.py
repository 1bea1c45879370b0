"""Defers Triton: what is written for it stays plain Python until a kernel is first launched.

Importing triton takes time that users of CPUs need not spend. A module of kernels takes ``tl`` and the two
decorators from here; ``Deferred.triton`` compiles a function in a copy of its module's globals, in which ``tl`` is
``triton.language``, each deferred function is compiled, and constants in capitals are ``tl.constexpr``. Called from
Python, a rule computes on torch tensors: ``tl`` is then the few functions of ``triton.language`` that rules use.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    import numpy
except ImportError:  # torch does not need it, and then nor does this package
    numpy = None  # type: ignore[assignment]


class _Torch:
    """The part of ``triton.language`` that rules use, on torch tensors."""

    float32, float64 = torch.float32, torch.float64
    abs, sqrt, div_rn = torch.abs, torch.sqrt, torch.div
    minimum, maximum = torch.minimum, torch.maximum

    @staticmethod
    def where(condition: Tensor, x: Tensor | float, y: Tensor | float) -> Tensor:
        """``torch.where``; of float32 on CPUs in an eighth of the time: torch's own does not vectorise."""
        if condition.device.type != "cpu":
            return torch.where(condition, x, y)
        x, y = torch.as_tensor(x), torch.as_tensor(y)
        if not x.dtype == y.dtype == torch.float32:
            return torch.where(condition, x, y)
        bits = y.view(torch.int32)
        return (condition.to(torch.int32) * (x.view(torch.int32) ^ bits) ^ bits).view(torch.float32)

    @staticmethod
    def sqrt_rn(v: Tensor) -> Tensor:
        """Take the root, correctly rounded; torch.sqrt is up to one unit off on CPUs (MKL's vector library)."""
        if numpy is None or v.device.type != "cpu":
            return newton_sqrt(v)
        with numpy.errstate(invalid="ignore"):
            return torch.from_numpy(numpy.sqrt(v.numpy()))  # the processor's own instruction


def newton_sqrt(v: Tensor) -> Tensor:
    """Take the correctly rounded root in torch alone: a Newton step in float64."""
    guess = v.sqrt().double().clamp_(1e-300, 1e300)
    return v.double().div_(guess).add_(guess).mul_(0.5).float()


tl: Any = _Torch()


class Deferred:
    """A function for Triton, compiled when ``triton`` is first asked for; ``eager`` is what calls from Python run."""

    def __init__(
        self, function: Callable[..., Any], eager: Callable[..., Any], options: dict[str, Any], **rules: Deferred
    ) -> None:
        self.function, self.eager, self._options, self._rules = function, eager, options, rules
        self._compiled: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """Compute on torch tensors."""
        return self.eager(*arguments)

    def bind(self, **rules: Deferred) -> Deferred:
        """Return the same function with other rules where it calls these names of its module."""
        return Deferred(self.function, self.eager, self._options, **rules)

    def called_by(self, function: Callable[..., Any]) -> Deferred:
        """Return a function that calls this one as a kernel of the same options."""
        return Deferred(function, self.eager, self._options)

    @property
    def triton(self) -> Any:
        """Return the ``triton.jit`` function."""
        names = _namespace(self.function.__globals__)
        if self._compiled is None:
            if self._rules:
                names = names | {name: rule.triton for name, rule in self._rules.items()}
            import triton

            code, name = self.function.__code__, self.function.__name__
            copy = types.FunctionType(code, names, name, self.function.__defaults__)
            copy.__annotations__, copy.__qualname__ = self.function.__annotations__, name
            copy.__module__, copy.__doc__ = self.function.__module__, self.function.__doc__
            self._compiled = triton.jit(copy, **self._options)
        return self._compiled


def interpreting() -> bool:
    """Tell whether Triton interprets kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _on_gpu_only(*_: Any) -> Any:
    raise TypeError("this function is for Triton: it runs inside kernels")


def jit(*, eager: Callable[..., Any] = _on_gpu_only, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a kernel, or a function that kernels call; ``options`` are ``triton.jit``'s."""
    return lambda function: Deferred(function, eager, options)


def rule(function: Callable[..., Any]) -> Any:
    """Make of ``function`` a formula: kernels call it, Python calls it with tensors, and C is printed from it.

    It is elementwise, and made of its arguments, float literals, operators, ``if`` on constants of the kernel, ``tl``
    (where, abs, sqrt_rn, div_rn), ``of(k, COLUMN)`` and other rules.
    """
    return Deferred(function, function, {})


_namespaces: dict[str, dict[str, Any]] = {}


def _namespace(module: dict[str, Any]) -> dict[str, Any]:
    """Return a module's globals as its kernels see them."""
    name = module["__name__"]
    if name not in _namespaces:
        import triton.language

        _namespaces[name] = names = {"tl": triton.language, **module}  # the interpreter wants it, used or not
        for key, value in module.items():
            if value is tl:
                names[key] = triton.language
            elif isinstance(value, Deferred):
                names[key] = value.triton
            elif isinstance(value, types.ModuleType) and any(isinstance(v, Deferred) for v in vars(value).values()):
                names[key] = types.ModuleType(key)
                vars(names[key]).update(_namespace(vars(value)))
            elif isinstance(value, (int, float)) and key.isupper():
                plain = value if isinstance(value, float) else int(value)
                names[key] = plain if interpreting() else triton.language.constexpr(plain)
    return _namespaces[name]


@jit(eager=lambda k, which: k[:, which, None])
def of(k, which: tl.constexpr):
    """Read a coefficient: of one tensor, from its row of the table, in a kernel; in Python by block, [blocks, 1]."""
    return tl.load(k + which)
