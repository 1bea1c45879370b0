"""The way from a DeepSpeed config to an optimizer; ``integrations.deepspeed`` says what each key becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ..core.settings import Params, Ranks

_Optimizer = TypeVar("_Optimizer", bound=Any)


class FromDeepSpeed:
    """Gives an optimizer ``from_deepspeed``."""

    @classmethod
    def from_deepspeed(
        cls: type[_Optimizer], params: Params, config: Mapping[str, Any], process_group: Ranks = None, **options: Any
    ) -> _Optimizer:
        """Make the optimizer that a DeepSpeed config describes, with DeepSpeed 0.19.6's numerics.

        Those are: l2 scales over everything and no bias correction. Of two stages also: coordinates with v == 0 are
        left as they are, and ``freeze_step`` F means F - 1 uncompressed updates: DeepSpeed's first ``step()`` only
        sets up its buffers and drops the gradient, but is counted. Ours drops none. Of LAMB also:
        ``integrations.deepspeed.DeepSpeedLayerwise``. Of 0/1 Adam: intervals count steps, that first one included;
        gradients are compressed until the variance is frozen, and weight decay is part of what is summed and of the
        rebuilt momentum (``integrations.deepspeed_zero_one``). Where learning rates change the residuals follow
        them; those of DeepSpeed's 0/1 Adam do not.

        Args:
            params: As for the constructor; per-group settings override the config's.
            config: The optimizer block, ``{"type": "OneBitAdam", "params": {...}}``, or its params.
            process_group: As for the constructor.
            options: Further arguments of the constructor; they go before the config's, and so does what ``numerics``
                and ``faults`` say.

        Raises:
            ValueError: for another optimizer, an unknown key, or a value with no counterpart.
        """
        from ..integrations import deepspeed  # here, as it imports the optimizers

        kind, arguments = deepspeed.translated(cls, config, **options)
        made: _Optimizer = kind(params, **arguments, process_group=process_group)
        return made
