"""GPUs as their makers state them, and what holds a compiled kernel up on each: the model of ``docs/performance.md``.

Nothing here is measured by this project. Bandwidths, multiprocessors and clocks are of the makers' datasheets: NVIDIA's
of T4, A100 (80 GB, SXM), H100 (SXM) and H200, AMD's of MI300X. Warps, programs, shared memory and lanes of the units
are of the CUDA C++ programming guide (compute capabilities; throughput of native arithmetic instructions).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

ATTAINABLE = 0.9
"""Of a datasheet's bandwidth, on every chip: what loads reached in published microbenchmarks of A100 and H100 (Luo et
al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture through Microbenchmarking", 2024), rounded."""
LAUNCH = 0.5e-6
"""Seconds between the end of a kernel and the begin of the next one of a CUDA graph: NVIDIA's "Getting Started with
CUDA Graphs" (2019) found 3.4 us for each kernel of 2.9 us."""
ISSUE = 4
"""Warp instructions that a multiprocessor starts in a cycle."""


@dataclass(frozen=True)
class Chip:
    """A GPU as its maker states it.

    Attributes:
        device: What torch calls it: a regular expression.
        bandwidth, clock: Bytes per second and Hz.
        target: What its kernels are compiled for; None where instructions can't be counted.
        registers, warps, programs, shared: That a multiprocessor holds.
        latency: Cycles until a load from memory is there, while memory is busy.
        fp64, conversions: Warp instructions in a cycle, of the FP64 units and of conversions from and to 64 bits.
    """

    name: str
    device: str
    bandwidth: float
    clock: float
    multiprocessors: int
    target: str | None
    registers: int = 65536
    warps: int = 64
    programs: int = 32
    shared: int = 227 * 1024
    latency: int = 700
    fp64: float = 2
    conversions: float = 0.5

    @property
    def bytes_per_cycle(self) -> float:
        """Of memory bandwidth, for each multiprocessor."""
        return self.bandwidth / self.multiprocessors / self.clock

    def resident(self, registers: int, num_warps: int, shared: int) -> int:
        """Programs that one multiprocessor holds."""
        by_registers = self.registers // (-(-registers // 8) * 8 * 32 * num_warps)
        return min(self.programs, self.warps // num_warps, by_registers, self.shared // (shared + 1024))


_TURING: dict[str, Any] = {"warps": 32, "programs": 16, "shared": 64 * 1024, "fp64": 1 / 16, "conversions": 1 / 16}
T4 = Chip("T4", r"\bT4\b", 320e9, 1.59e9, 40, "sm_75", **_TURING)
A100 = Chip("A100", r"A100.*80GB", 2.039e12, 1.41e9, 108, "sm_80", shared=163 * 1024, fp64=1)
# The clock is the least that NVIDIA states of a Hopper card without tensor cores, the PCIe's; an SXM's may be higher.
H100 = Chip("H100", r"H100 80GB HBM3", 3.35e12, 1.755e9, 132, "sm_90")
H200 = Chip("H200", r"H200", 4.8e12, 1.755e9, 132, "sm_90")
MI300X = Chip("MI300X", r"MI300X", 5.3e12, 2.1e9, 304, None)
CHIPS = (T4, A100, H100, H200, MI300X)


def chip_of(device: str) -> Chip | None:
    """Return the chip of a device's name; None if it is another."""
    return next((chip for chip in CHIPS if re.search(chip.device, device)), None)


CHAIN = 4
"""Loads that wait for each other in a program: a flag, the block's tensor, its address, its elements."""
CHAINS = {"pack": 1, "unpack": 1, "server_reduce": 2}
CHAINS |= {"finish": 14, "finish_alone": 18, "receive": 12, "lamb_coefficient": 5}
"""Where they are others, counted in the sources. Short segments have four blocks, which a lane loads one by one."""


@dataclass
class Variant:
    """One kernel, compiled for blocks of one size and one number of warps.

    Attributes:
        widths: Bytes per thread of its loads and stores, and how many there are of each.
        instructions, fp64, conversions, shuffles: Per warp and block, on the path of a full block.
        bytes: Per block.
        resident: Programs on a multiprocessor of Hopper.
    """

    kernel: str
    block: int
    num_warps: int
    registers: int
    spills: int
    shared: int
    barriers: int
    instructions: int
    fp64: int
    conversions: int
    shuffles: int
    roots: int
    bytes: float
    resident: int
    widths: dict[int, int]

    @property
    def per_element(self) -> float:
        """Instructions, of all threads."""
        return self.instructions * self.num_warps * 32 / self.block

    def limits(self, chip: Chip) -> dict[str, float]:
        """Cycles per 1024 elements of one multiprocessor, if nothing but this held it up."""
        scale, warps = 1024 / self.block, self.num_warps
        chain = chain_of(self.kernel) + self._turns
        # Shuffles have 32 lanes, roots and reciprocals 16.
        units = (self.fp64 / chip.fp64, self.conversions / chip.conversions, self.shuffles, self.roots / 0.5)
        resident = chip.resident(self.registers, warps, self.shared)
        return {
            "memory": scale * self.bytes / chip.bytes_per_cycle,
            "issue": scale * self.instructions * warps / ISSUE,
            "units": scale * warps * max(units),
            "latency": scale * (chip.latency * chain + self.instructions * 4) / resident,
        }

    @property
    def _turns(self) -> int:
        """How often the server's walk over the ranks waits for memory."""
        match = re.search(r"W=(\d+)", self.kernel)
        return sum(divmod(int(match.group(1)), 8)) if match else 0

    def share(self, chip: Chip) -> float:
        """Of memory bandwidth, at best."""
        limits = self.limits(chip)
        return limits["memory"] / max(limits.values())


def chain_of(kernel: str) -> int:
    """Return how many loads of a program wait for each other."""
    return CHAINS.get(kernel.partition(",")[0].partition(" in ")[0], CHAIN)
