"""Steps on gradients at 8, 4 or 1 bits, for their launch keys; see ``whole_steps``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusedonebit.comm import Format, QuantisedAllReduce, QuantisedReduceScatter, Step
from fusedonebit.triton_kernels import FlatLayout

FORMS = ((8, "bf16"), (4, "bf16"), (1, "bf16"), (4, "fp32"), (4, "8bit"), (8, None), (4, None))


class CompressedSGD(torch.optim.SGD):
    """SGD on gradients that were averaged, or reduced and scattered, as ``fusedonebit.compress`` does."""

    phase = "compressed"
    grad_scale: torch.Tensor | None = None
    """What the loss was multiplied with."""

    def __init__(
        self, params: Any, lr: float, process_group: Any, bits: int, feedback: str | None, scatters: bool = False,
        block_size: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(params, lr)
        self._ranks, self._form, self._scatters = process_group, Format(bits, feedback), scatters
        self._exchange: Any = None
        self._done = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._done += 1
        params = [p for group in self.param_groups for p in group["params"]]
        grads, ranks, form = [p.grad for p in params], self._ranks.world_size, self._form
        step = Step(self._done, () if self._done % 3 else (len(grads) - 1,), self.grad_scale)
        if not self._scatters:
            layout = FlatLayout(tuple(g.numel() for g in grads), ranks, form.block_size)
            self._exchange = self._exchange or QuantisedAllReduce(layout, self._ranks, form, grads[0].device)
            self._exchange(grads, step)
        else:
            flat = torch.cat([g.flatten() for g in grads])
            rows = list(torch.nn.functional.pad(flat, (0, -len(flat) % ranks)).view(ranks, -1))
            layout = FlatLayout((len(rows[0]),) * ranks, ranks, form.block_size)
            self._exchange = self._exchange or QuantisedReduceScatter(layout, self._ranks, form, grads[0].device)
            self._exchange(torch.empty_like(rows[0]), rows, step._replace(absent=()), 1 / ranks)


def runs(make: Callable[..., Any]) -> dict[str, Any]:
    """Return runs by name, each made by ``make`` of ``whole_steps.Run``'s fields."""
    found = {}
    for bits, feedback in FORMS:
        options = {"bits": bits, "feedback": feedback}
        for dtype in (torch.float32, torch.bfloat16):
            name = f"compress, {bits} bits, {feedback}, {str(dtype).removeprefix('torch.')}"
            found[name] = make(CompressedSGD, options, grad_dtypes=(dtype,), dtypes=(dtype,))
            found[f"{name}, scattered"] = make(CompressedSGD, options | {"scatters": True}, dtypes=(dtype,))
    usual = {"bits": 4, "feedback": "bf16"}
    found["compress, scaled"] = make(CompressedSGD, usual, special=("scaled",))
    found["compress, unaligned"] = make(CompressedSGD, usual, special=("unaligned",))
    found["compress, float16"] = make(CompressedSGD, usual, dtypes=(torch.float16,))
    found["compress, mixed"] = make(CompressedSGD, usual, dtypes=(torch.float32, torch.bfloat16))
    found["compress, one block"] = make(CompressedSGD, usual, sizes=(5,))
    found["compress, no number"] = make(CompressedSGD, usual, special=("nonfinite",))
    found["compress, 16 ranks"] = make(CompressedSGD, usual, world_size=16)
    return found
