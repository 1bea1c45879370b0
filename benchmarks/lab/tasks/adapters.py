"""Adapt a frozen transformer to other text by products of low rank, which are added to its matrices (LoRA)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.func import functional_call

from . import text
from .supervised import fixed

RANK = 4
PRETRAINING, BATCH, LR = 300, 64, 1e-2


def adapters() -> text.Language:
    """Return adapters that teach documentation to a transformer which has learned Python's standard library."""
    return text.Language(_Adapted(_pretrained()), text.corpus(source=False, length=text.LENGTH))


@lru_cache(maxsize=1)
def _pretrained() -> nn.Module:
    """Train the network that stays: the same in all runs, on one thread, which has the same bits everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        learner = text.Language(text.Transformer(causal=True), text.corpus(source=True, length=text.LENGTH))
    (model,), draw = learner.models, fixed()
    params = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(params.values(), LR, betas=(0.9, 0.99))
    for step in range(PRETRAINING):
        optimizer.param_groups[0]["lr"] = LR * (1 - step / PRETRAINING)
        optimizer.zero_grad()
        learner.loss(0, [params], learner.batch(draw, BATCH, step / PRETRAINING)).backward()
        optimizer.step()
    torch.set_num_threads(threads)
    return model.requires_grad_(False)


class _Adapted(nn.Module):
    """A module with ``up @ down`` added to the weight of each of its linear layers, of which ``up`` begins as 0."""

    def __init__(self, frozen: nn.Module) -> None:
        super().__init__()
        self.frozen = (frozen,)  # no submodule: its parameters are none of these
        self.up, self.down = nn.ParameterDict(), nn.ParameterDict()
        for name, module in frozen.named_modules():
            if isinstance(module, nn.Linear):
                rows, columns = module.weight.shape
                key = name.replace(".", "_")
                self.up[key] = nn.Parameter(torch.zeros(rows, RANK))
                self.down[key] = nn.Parameter(torch.randn(RANK, columns) * columns**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        (frozen,) = self.frozen
        weights: dict[str, Tensor] = dict(frozen.named_parameters())
        for name in weights:
            if (key := name.removesuffix(".weight").replace(".", "_")) in self.up:
                weights[name] = weights[name] + self.up[key] @ self.down[key]
        return functional_call(frozen, weights, (tokens,))
