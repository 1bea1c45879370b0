"""Arguments of an op by name, and as torch's op takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusedonebit.triton_kernels.op import OPS


class Arguments(tuple[Any, ...]):
    """An op's arguments, up to the last one that was given; each by its name as well: nouns, and fields of nouns."""

    op: str
    count = property(lambda self: self.__getattr__("count"))  # which tuples have a method of

    def __getattr__(self, name: str) -> Any:
        if name == "op" or name.startswith("__"):  # of one that is being copied
            raise AttributeError(name)
        parameters = OPS[self.op].signature.whole.parameters
        if name not in parameters:
            argument, field = self._field(name)
            noun = getattr(self, argument)
            return None if noun is None else getattr(noun, field)
        at = list(parameters).index(name)
        return self[at] if at < len(self) else parameters[name].default

    def _field(self, name: str) -> tuple[str, str]:
        """Return the argument that a flat name begins with, and the rest."""
        parameters = OPS[self.op].signature.whole.parameters
        found = [each for each in parameters if name.startswith(f"{each}_")]
        if not found:
            raise AttributeError(f"{self.op} has no argument {name}: it has {', '.join(parameters)}")
        argument = max(found, key=len)
        return argument, name.removeprefix(f"{argument}_")

    def _asdict(self) -> dict[str, Any]:
        """Return all of them by name."""
        given = OPS[self.op].signature.whole.bind(*self)
        given.apply_defaults()
        return given.arguments

    def _replace(self, **named: Any) -> Arguments:
        """Return them with others in place of some; what lies between those given and these has its default."""
        given = OPS[self.op].signature.whole.bind(*self)
        for name in [name for name in named if name not in given.signature.parameters]:
            argument, field = self._field(name)
            named[argument] = named.get(argument, getattr(self, argument))._replace(**{field: named.pop(name)})
        if any(name not in given.arguments for name in named):
            given.apply_defaults()
        given.arguments.update(named)
        return made(self.op, given.args)


def made(op: str, values: Sequence[Any]) -> Arguments:
    """Return values as the arguments of an op."""
    arguments = Arguments(values)
    arguments.op = op
    return arguments


def arguments_of(name: str, *values: Any, **named: Any) -> Any:
    """Return an op's arguments."""
    return made(name, values)._replace(**named) if named else made(name, values)


def flat(name: str, arguments: Sequence[Any]) -> Sequence[Any]:
    """Return arguments as ``torch.ops.fusedonebit`` takes them: nouns as their fields."""
    return OPS[name].signature.flat(*arguments)
