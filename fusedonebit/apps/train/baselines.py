"""The optimizers that Marsit is measured against (its table 2): same local updates, another way to agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ...comm import MarsitAllReduce, Section, Topology, Transport
from ...comm.rounds import RoundAllReduce
from ...core.options import check_choice, check_count
from ...core.settings import NUMERICS, Numerics, Params, Ranks
from ...optim.marsit import MarsitOptimizer
from ...optim.marsit_algorithm import Marsit
from ...optim.marsit_options import LocalOptions
from .baseline_reducers import Cascading, Coding, ErrorFeedback, HopBaseline, MajorityVote, StochasticSign

AGGREGATIONS: dict[str, type[HopBaseline] | None] = {
    "psgd": None,  # Marsit that is always of full precision
    "signsgd": MajorityVote,
    "ef-signsgd": ErrorFeedback,
    "ssdm": StochasticSign,
    "cascading": Cascading,
}
"""By the name that ``aggregation`` takes; see ``baseline_reducers`` for what each does."""


@dataclass(frozen=True, kw_only=True)
class BaselineOptions(LocalOptions):
    """Settings of a baseline. See ``BaselineSGD`` for their meaning."""

    aggregation: str
    topology: Topology
    coding: Coding
    local_steps: int
    seed: int
    recorded: ClassVar = (*LocalOptions.recorded, "local_steps", "aggregation", "topology", "coding", "seed")

    @property
    def round_steps(self) -> int:
        """See ``LocalOptions``."""
        return self.local_steps

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        super().check()
        check_choice("aggregation", self.aggregation, sorted(AGGREGATIONS))
        check_choice("topology", self.topology, ("ring", "torus"))
        check_choice("coding", self.coding, ("elias", "fixed"))
        check_count("seed", self.seed)


class BaselineAdamOptions(BaselineOptions):
    """Settings of ``BaselineAdam``."""

    usual: ClassVar[dict[str, Any]] = {"bias_correction": True}


class Baseline(Marsit):
    """Marsit's steps, with another way to agree."""

    traits: ClassVar = Marsit.traits._replace(settings=BaselineOptions)
    options: BaselineOptions

    def make_reducer(self, transport: Transport, part: Section) -> RoundAllReduce:
        """See ``Marsit``."""
        options, kind = self.options, AGGREGATIONS[self.options.aggregation]
        where: dict[str, Any] = {"device": self.frame.device, "live": self.frame.live, "part": part}
        if kind is None:
            return MarsitAllReduce(part.layout, transport, full_precision_every=1, **where)
        wire: dict[str, Any] = {"topology": options.topology, "coding": options.coding}
        return kind(part.layout, transport, **wire, seed=options.seed, **where)

    def described(self) -> list[str]:
        """See ``Algorithm``."""
        return [f"aggregation: {self.options.aggregation}", f"local_steps: {self.options.local_steps}"]


class AdaptiveBaseline(Baseline):
    """The same, with the local updates of Adam."""

    traits: ClassVar = Marsit.traits._replace(settings=BaselineAdamOptions)


class BaselineSGD(MarsitOptimizer):
    """SGD with momentum whose workers agree as one of Marsit's baselines does; plain torch, not made for speed.

    Args:
        params: As for ``MarsitSGD``.
        lr: eta_l.
        momentum: mu.
        weight_decay: Added to the gradient as in ``torch.optim.SGD``.
        aggregation: "psgd", "signsgd", "ef-signsgd", "ssdm" or "cascading"; see ``baseline_reducers``.
        topology: "ring" or "torus"; "psgd" leaves it to the library's all-reduce.
        coding: Of sums of signs: "elias" or "fixed" width.
        global_ratio: eta_s / eta_l of "signsgd" and "ssdm"; the others' updates have a size of their own.
        local_steps: Steps of a round.
        seed: Of random signs.
        process_group, numerics: As for ``MarsitSGD``.

    Raises:
        TypeError, ValueError: for bad arguments, on every rank, naming the first that differs.
    """

    kind = Baseline

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        aggregation: str,
        topology: Topology = "ring",
        coding: Coding = "elias",
        global_ratio: float = 0.1,
        local_steps: int = 1,
        seed: int = 0,
        process_group: Ranks = None,
        numerics: Numerics = NUMERICS,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "global_ratio": global_ratio}
        settings: dict[str, Any] = {"aggregation": aggregation, "topology": topology, "coding": coding, "seed": seed}
        settings |= {"local_steps": local_steps, "numerics": numerics}
        super().__init__(params, defaults, process_group=process_group, **settings)


class BaselineAdam(MarsitOptimizer):
    """AdamW whose workers agree as one of Marsit's baselines does; see ``BaselineSGD`` and ``MarsitAdam``."""

    kind = AdaptiveBaseline

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        aggregation: str,
        topology: Topology = "ring",
        coding: Coding = "elias",
        global_ratio: float = 0.3,
        local_steps: int = 1,
        seed: int = 0,
        process_group: Ranks = None,
        numerics: Numerics = NUMERICS,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "global_ratio": global_ratio}
        settings: dict[str, Any] = {"aggregation": aggregation, "topology": topology, "coding": coding, "seed": seed}
        settings |= {"local_steps": local_steps, "numerics": numerics}
        super().__init__(params, defaults, process_group=process_group, **settings)
