"""Newton-Schulz: turns matrices into orthogonal ones, nearly, by products alone (Jordan, 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..comm import Transport
from ..comm.assembly import Assembly
from ..comm.owned_signs import Shares
from ..comm.owners import Kind, Matrix, Shape
from ..core.frame import Frame
from ..core.header import FLAG, Field, Fields
from ..core.members import Members
from ..core.part import Part
from ..core.state_tensor import StateTensor
from ..triton_kernels import Coef, FlatLayout, move_along

Coefficients = tuple[float, float, float]
LEAST = 1e-4
"""What is added to each eigenvalue, of a mean of 1, before its inverse root is taken."""
WHITENED = "whitened"
"""The key of a checkpoint's header that says whether its momenta are."""
OF_SEVERAL = "of_several"
"""And whether it is of several ranks, of which each has residuals."""
HEADER: Fields = {WHITENED: Field(FLAG), OF_SEVERAL: Field(FLAG)}


def orthogonalised(x: Tensor, coefficients: Coefficients, steps: int, eps: float, dtype: torch.dtype) -> Tensor:
    """Return for each of ``x`` [count, m, n] nearly the orthogonal matrix nearest to it, as torch.optim.Muon does.

    Singular values become numbers about 1, in steps of x := a*x + (b*A + c*A^2)*x with A = x*x^T, of the smaller side.
    Three launches a step, whatever the count; on CPUs bit for bit torch's.

    Args:
        x: Any float dtype.
        coefficients: a, b and c.
        steps: How many.
        eps: The least Frobenius norm by which matrices are divided before.
        dtype: In which all this is computed.

    Returns:
        [count, m, n] in ``dtype``.
    """
    a, b, c = coefficients
    tall = x.shape[1] > x.shape[2]
    x = x.to(dtype)
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Orthogonaliser:
    """Orthogonalises matrices of several kinds, all of one kind at once; shards together with who has the others.

    Args:
        orthogonalise: As ``orthogonalised``, of its first argument.
        dtype: What that returns.
        shards: Connects the ranks that have the shards.
        device: Where matrices lie.
        kinds: What matrices are in full, and how many there are of each.
    """

    def __init__(
        self,
        orthogonalise: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
        shards: Transport,
        device: torch.device,
        kinds: Sequence[tuple[Kind, int]],
    ) -> None:
        self._orthogonalise, self._stacks = orthogonalise, [kind.stack for kind, _ in kinds]
        self._assembly = Assembly(shards, kinds, dtype, device) if shards.world_size > 1 else None

    def __call__(self, directions: Sequence[Tensor]) -> list[Tensor]:
        """Return updates of ``directions``, of each kind what this rank has [number, rows, columns]."""
        whole = self._whole
        return whole(directions) if self._assembly is None else self._assembly(directions, whole)

    def _whole(self, directions: Sequence[Tensor]) -> list[Tensor]:
        found = list[Tensor]()
        for x, stack in zip(directions, self._stacks, strict=True):
            count, m, n = x.shape
            each = x if stack == 1 else x.reshape(count * stack, m // stack, n)
            found.append(self._orthogonalise(each).reshape(x.shape) if count else x)
        return found

    def held(self) -> list[Tensor]:
        """Return what lives from step to step."""
        return [] if self._assembly is None else self._assembly.held()


def adjustment(rows: int, columns: int, adjust_lr_fn: str) -> float:
    """Return what a matrix's learning rate is multiplied with, as torch.optim.Muon's ``adjust_lr_fn`` says."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _slowest(p: Tensor) -> int:
    return max(range(p.dim()), key=lambda i: (p.stride(i), -i))


def is_matrix(p: Tensor) -> bool:
    """Tell whether a parameter is one, as it lies in memory: a row for each of its first dimension, or a transpose."""
    return p.dim() >= 2 and p.numel() > 0 and (p.dim() == 2 or p.shape[0] == p.shape[_slowest(p)])


class Matrices(NamedTuple):
    """Parameters as matrices; a kernel has a row for each of its outputs."""

    members: Members
    each: Sequence[Matrix]
    """As they lie in memory, where another order of dimensions is a transpose."""
    sizes: Sequence[float]
    """What the learning rate of each is multiplied with."""
    roots: Sequence[float]
    """What its update's root mean square is one over."""

    @classmethod
    def of(cls, members: Members, frame: Frame, adjust_lr_fn: str) -> Matrices:
        """Return those of an optimizer."""
        each, sizes, roots = list[Matrix](), list[float](), list[float]()
        plist = frame.parameters
        for i in members.which:
            p, here, stack = plist.owners[i], plist.params[i], frame.groups[plist.group_of[i]]["stacks"]
            rows, of_one = p.shape[_slowest(p)], (p.shape[0] // stack, p.numel() // p.shape[0])
            columns = p.numel() // rows
            each.append(Matrix((here.numel() // columns, columns), Kind((rows, columns), stack)))
            sizes.append(adjustment(*of_one, adjust_lr_fn))
            roots.append(max(of_one) ** 0.5)
        return cls(members, each, sizes, roots)

    @property
    def shapes(self) -> list[Shape]:
        """Return rows and columns of each, as it lies in memory here."""
        return [each.shape for each in self.each]


class MuonUpdate(Part):
    """Muon's update from averaged gradients, as torch.optim.Muon's: what is left of 1-bit Muon on a rank alone.

    Args:
        frame: Of the optimizer, of matrices alone.
        matrices: Its parameters.
        shares: As of ``OwnedSigns``.
        orthogonaliser: Makes an ``Orthogonaliser`` of these kinds.

    Attributes:
        momentum: float32 [P].
    """

    header_fields: ClassVar[Fields] = HEADER

    def __init__(
        self,
        frame: Frame,
        matrices: Matrices,
        shares: Callable[[], Shares],
        orthogonaliser: Callable[[Sequence[tuple[Kind, int]]], Orthogonaliser],
    ) -> None:
        self._frame, self._shares = frame, shares
        self._members, layout = matrices.members, matrices.members.layout
        self.momentum = torch.zeros(layout.numel, device=frame.device)
        self._whitened_by = frame.nothing
        self._scale = by_block(layout, matrices.sizes).to(frame.device)
        self._shapes, kinds = matrices.shapes, [each.whole for each in matrices.each]
        self._alike = {kind: [i for i, own in enumerate(kinds) if own == kind] for kind in dict.fromkeys(kinds)}
        self._orthogonalise = orthogonaliser([(kind, len(own)) for kind, own in self._alike.items()])

    def __call__(self, grads: Sequence[Tensor], coef: Tensor, skip: Tensor, *found: Tensor | None) -> None:
        """Make one update, as ``averaging.Update``."""
        frame, members, (beta, newest) = self._frame, self._members, self._shares()
        grads, coef, momenta = members.of(grads), members.of(coef), members.layout.cut(self.momentum)
        directions, updates = list[Tensor](), [frame.nothing] * len(grads)
        for own in self._alike.values():
            g = torch.stack([grads[i] for i in own])
            if any(group["maximize"] for group in frame.hyper.taken):
                g = g * coef[own, Coef.ONE_MINUS_BETA1, None].sign()
            before = torch.stack([momenta[i] for i in own])
            still = skip != 0
            if frame.absent is not None:
                still = still | frame.absent[own, None]
            after = before.lerp(g, 1 - beta)
            direction = g.lerp(after, 1 - newest) if newest else after
            torch._foreach_copy_([momenta[i] for i in own], list(torch.where(still, before, after).unbind(0)))
            directions.append(direction.view(len(own), *self._shapes[own[0]]))
        for own, made in zip(self._alike.values(), self._orthogonalise(directions), strict=True):
            made = made.float() if made.dtype is torch.float64 else made  # which the op does not read
            for i, update in zip(own, made.contiguous().unbind(0), strict=True):
                updates[i] = update
        how = frame.rounding, members.correction
        move_along(members.dense, updates, members.places, self._scale, coef, skip, *how)

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        which = self._members.which
        m = StateTensor("momentum_buffer", "element", self.momentum, published=True, members=which)
        of_several: dict[str, Any] = {"members": which, "only": WHITENED}
        by = StateTensor("whitened_by", "element", self._whitened_by, **of_several)
        return m, by, StateTensor("gram", "element", self._frame.nothing, wanted=False, **of_several)

    def plain_state(self) -> dict[str, Any]:
        return {WHITENED: False, OF_SEVERAL: False}

    def resume(self, header: Mapping[str, Any]) -> None:
        if header[WHITENED]:
            self._whitened_by = torch.zeros_like(self.momentum)

    def resumed(self, header: Mapping[str, Any]) -> None:
        if header[WHITENED]:  # by several ranks
            cut = self._members.layout.cut
            for m, by, shape in zip(cut(self.momentum), cut(self._whitened_by), self._shapes, strict=True):
                m.copy_(raw(m, by, shape).view(-1))
            self._whitened_by = self._frame.nothing


def raw(momentum: Tensor, made_of: Tensor, shape: Shape) -> Tensor:
    """Return a momentum, float32 of ``shape``, as it was before it was whitened.

    Args:
        momentum: Whitened, of as many elements.
        made_of: With what: a Gram matrix, its elements the first of as many.
        shape: Rows and columns.
    """
    n = min(shape)
    _, back = inverse_root(made_of.reshape(-1)[: n * n].view(1, n, n))
    return times(momentum.reshape(1, *shape), back)[0]


def by_block(layout: FlatLayout, sizes: Sequence[float]) -> Tensor:
    """Return a number of each tensor for each of its blocks, float32 [B]; of padding 1."""
    found = torch.ones(layout.n_blocks)
    for i, size in enumerate(sizes):
        found[slice(*layout.first_block[i : i + 2])] = size
    return found


def times(x: Tensor, side: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply matrices [count, rows, columns] by ``side`` [count, n, n] of their smaller side."""
    return torch.bmm(*pair(x, side), out=out)


def pair(x: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of that, in their order."""
    return (x, side) if x.shape[1] >= x.shape[2] else (side, x)


def inverse_root(square: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverse roots and the roots of Gram matrices [count, n, n], divided by their mean eigenvalues.

    Of nothing, or of what is no number, the identity.
    """
    mean = square.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    unit = torch.eye(square.shape[-1], device=square.device).expand_as(square)
    usable = (mean > 0) & mean.isfinite() & square.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    values, q = torch.linalg.eigh(torch.where(usable, square / mean, unit))
    root = torch.where(usable[..., 0], values.clamp(min=0) + LEAST, 1.0).sqrt()[:, None]
    return (q / root) @ q.mT, (q * root) @ q.mT
