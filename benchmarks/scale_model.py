"""What one rank holds and moves for any number of parameters and ranks: formulas, no tensors.

``tests/test_scale.py`` holds each against the thing itself, where that fits into this machine's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusedonebit.apps.plan import METHODS, Network
from fusedonebit.comm import Messages
from fusedonebit.comm.message import HEADER_BYTES
from fusedonebit.triton_kernels import FlatLayout
from fusedonebit.triton_kernels.layout import SCALE_BLOCK
from fusedonebit.triton_kernels.receive import spans_of

from .audit_kernels import audited
from .chips import ATTAINABLE, H200, LAUNCH, Chip

ASPECT = 128
"""Width over depth of a transformer, as GPT-3's (12,288 wide, 96 deep)."""


def transformer(parameters: float) -> tuple[int, ...]:
    """Sizes of the tensors of a transformer of about that many parameters.

    12 tensors a layer, 12 h^2 parameters, and a vocabulary of 32 h, at most 50,304. Width and depth both grow
    like the cube root, and so does the number of tensors.
    """
    width = next(h for h in range(16, 1 << 20, 16) if sum(_of_width(h)) >= parameters)
    return _of_width(width)


def _of_width(h: int) -> tuple[int, ...]:
    layer = (3 * h * h, 3 * h, h * h, h, h, h, 4 * h * h, 4 * h, 4 * h * h, h, h, h)
    return (min(32 * h, 50304) * h, 1024 * h, *(layer * max(2, round(h / ASPECT))), h, h)


# ---------------------------------------------------------------- the flat index space


def segments(layout: FlatLayout) -> tuple[int, int, int]:
    """Scales of all elements, of rank 0's chunk, and of the chunk that has most; no table per block is built."""
    each = SCALE_BLOCK // layout.block_size
    last, real = max(len(layout.sizes) - 1, 0), layout.first_block
    starts, total = [], 0
    for tensor in range(len(layout.sizes)):
        starts.append(total)
        # Padding blocks behind the last tensor count as its own.
        blocks = (layout.n_blocks if tensor == last else real[tensor + 1]) - real[tensor]
        total += -(-blocks // each)
    of_chunk, tensor = [], 0
    for chunk in range(layout.world_size):
        ends = []
        for block in (chunk * layout.blocks_per_chunk, (chunk + 1) * layout.blocks_per_chunk - 1):
            while tensor < last and real[tensor + 1] <= block:
                tensor += 1
            ends.append(starts[tensor] + (block - real[tensor]) // each)
        of_chunk.append(ends[1] - ends[0] + 1)
    return total, of_chunk[0], max(of_chunk)


def message_bytes(layout: FlatLayout) -> int:
    """Of one message, where 4096 elements share a scale."""
    return Messages.size(segments(layout)[2], layout)


# ---------------------------------------------------------------- memory


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds, by what they grow with."""

    elements: int
    """What there is per element: c, v, LAMB's fresh v, bits, the server's c."""
    tables: int
    """What there is per block or scale, besides the same of the server's chunk."""
    ranks: int
    """Headers and scales of W messages, W headers that arrived."""
    tensors: int
    """Rows of coefficients and live elements, and scalars."""
    scratch: int
    """What only serves within a step: messages on their way, partial sums."""

    @property
    def state(self) -> int:
        """What ``stats()["state_bytes"]`` counts."""
        return self.elements + self.tables + self.ranks + self.tensors


def memory(layout: FlatLayout, optimizer: str) -> Memory:
    """Of ``OneBitAdam`` ("adam") or ``OneBitLamb`` ("lamb") in the compression stage, with their defaults."""
    lamb = optimizer == "lamb"
    total, own, most = segments(layout)
    blocks, served, ranks = layout.n_blocks, layout.blocks_per_chunk, layout.world_size
    message, bits = Messages.size(most, layout), layout.numel // 8
    elements = 8 * layout.numel + 4 * layout.chunk_numel + bits
    # int32 or float32 per block: its tensor, live row, live elements, two scales, its segment, the guard's weight.
    tables = 7 * 4 * blocks + 2 * 4 * served
    # Per scale, of 32 blocks at most: its first block and number, and in 8 bytes its count; and one more end.
    tables += 16 * total + 4 + 16 * own + 4
    across = ranks * (message - layout.chunk_bytes) + HEADER_BYTES * ranks
    scalars = 9 * 4 + 7 * 8 + 1
    tails = {size % layout.block_size for size in layout.sizes} - {0}
    count = len(layout.sizes)
    # Of each tensor float64 updates, in all and in its variance.
    tensors = scalars + (2 + len(tails)) * layout.block_size // 8 + 2 * 8 * count
    # Partial sums float64 [2, B], settled scales float32 [B], and those of the chunk; messages to all, and its own.
    scratch = 20 * blocks + 20 * served + (ranks + 1) * message
    # Each scale; what a program leaves of 128 of them, five float64; and the programs' ticket.
    scratch += 4 * total + 4 * own
    scratch += 40 * -(-total // 128) + 40 * -(-own // 128) + 2 * 4
    # What each program that takes messages up gives to the norm of the update.
    scratch += 8 * ranks * spans_of(layout.blocks_per_chunk)
    if lamb:
        elements += 4 * layout.numel + 4 * 8 + bits  # the warm-up's gradients, tail included; the last bits
        tensors += 4 * count  # the tail's words of each tensor
        tables += 4 * blocks  # the last scales
        tensors += 4 + 4 * 4 * count + 2 * 8 * (count + 1)
        scratch += 4 * blocks
    return Memory(elements, tables, across, tensors, scratch)


LAUNCHER_TABLES = 16
"""Bytes per block that the kernels' launcher keeps besides, on a GPU: where a block starts, which elements are real."""


# ---------------------------------------------------------------- time


LAUNCHES = {"adam": 11, "lamb": 13}
"""Of a step, captured as one CUDA graph (``tests/test_predictions.py``)."""


def kernel_bytes(optimizer: str, world_size: int) -> dict[str, float]:
    """Bytes per parameter that each kernel of a step moves, as the audit counts them for float32."""
    count, adam = audited(), optimizer == "adam"
    suffix = ", preconditioned" if adam else ""
    found = {"momentum_compress": count[f"momentum_compress{suffix}"], "finish": count["finish"]}
    # Linear in W: W - 2 more messages are read.
    each = (count["server_reduce, W=64"] - count["server_reduce, W=2"]) / 62
    served = count["server_reduce, W=2"] + each * (world_size - 2) + count["finish"]
    found["server_reduce"] = served / world_size
    if not adam:
        found |= {"lamb_ratio": count["lamb_ratio"], "lamb_rescale": count["lamb_rescale"]}
    return found | {"receive": count["receive"], "apply_momentum": count[f"apply_momentum{suffix}"]}


RESIDENT = 132 * 16
"""Programs of ``server_reduce`` that a Hopper GPU runs at a time."""
RANKS_IN_FLIGHT = 8
"""Ranks whose bytes ``server_reduce`` waits for together."""


def kernel_seconds(layout: FlatLayout, optimizer: str, chip: Chip = H200) -> dict[str, float]:
    """Memory time of a step's kernels; what the server waits besides, as it walks over the ranks; and all launches."""
    moved = kernel_bytes(optimizer, layout.world_size)
    memory = {name: nbytes * layout.numel / (ATTAINABLE * chip.bandwidth) for name, nbytes in moved.items()}
    waves = -(-layout.blocks_per_chunk // RESIDENT)
    walk = waves * -(-layout.world_size // RANKS_IN_FLIGHT) * chip.latency / chip.clock
    return {
        "memory": sum(memory.values()),
        "walk": max(0.0, walk - memory["server_reduce"]),
        "launches": LAUNCHES[optimizer] * LAUNCH,
    }


def wire_seconds(parameters: float, world_size: int, network: Network) -> dict[str, float]:
    """What the planner says of one step's messages, in each way there is."""
    return {name: METHODS[name].cost(parameters, world_size, network).seconds for name in WAYS}


WAYS = ("flat", "hierarchical-bf16", "marsit-owner", "bf16")
