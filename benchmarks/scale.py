"""A rank's step from 10^6 to 10^11 parameters and 2 to 16,384 ranks: ``python -m benchmarks.scale``.

What fits is run: the layout and its tables up to 10^10 parameters, and one rank's whole step, with nobody at
the other end (``loopback``), for up to 16,384 ranks. The rest follows from formulas that the tests hold against
what was run (``scale_model``), with the audit's bytes and the planner's network. Writes
``results/scale/scale.json``, ``docs/tables/scale.md``, and ``docs/scale.png``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from torch.utils._python_dispatch import TorchDispatchMode

from fusedonebit import Layerwise, OneBitAdam, OneBitLamb
from fusedonebit.apps.pictures import METHODS, clear, lighter, plt, save
from fusedonebit.apps.plan import Network
from fusedonebit.triton_kernels import FlatLayout, choose_block_size, live_table

from . import pages
from . import scale_model as model
from .loopback import Loopback
from .pages import DOCS, TABLES, keep, markdown, read, write_tables

PARAMETERS = tuple(10**n for n in range(6, 12))
RANKS = (2, 8, 64, 256, 1024, 4096, 16384)
NETWORK = Network(between=50e9, inside=450e9, gpus_per_node=8)
"""Eight H200 a node: a card of 400 Gbit/s for the whole node and NVLink inside."""
OPTIMIZERS = {"adam": OneBitAdam, "lamb": OneBitLamb}
RESULTS = pages.RESULTS / "scale" / "scale.json"
PAGE = TABLES / "scale.md"


def layout_of(sizes: tuple[int, ...], ranks: int) -> FlatLayout:
    """The layout that an optimizer would choose."""
    return FlatLayout(sizes, ranks, choose_block_size(sizes, ranks))


# ---------------------------------------------------------------- what is run


class Operations(TorchDispatchMode):
    """Counts the operations that a host starts, and the elements of the largest result.

    An op of ours is one, whatever eager does inside: on a GPU it is one launch or two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += 1
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor):
                self.largest = max(self.largest, each.numel())
        return result


def made(sizes: tuple[int, ...], ranks: int, optimizer: str) -> Any:
    """Rank 0 of many, with gradients, in the compression stage."""
    params = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    for p in params:
        p.grad = torch.randn_like(p)
    # Two updates are enough for LAMB's averages with beta3 = 0.
    more: dict[str, Any] = {"layerwise": Layerwise(beta3=0.0)} if optimizer == "lamb" else {}
    result = OPTIMIZERS[optimizer](params, lr=1e-3, freeze_step=1, process_group=Loopback(ranks), **more)
    for _ in range(2):
        result.step()
    return result


def run_step(sizes: tuple[int, ...], ranks: int, optimizer: str) -> dict[str, Any]:
    """One step of one rank, as it runs here."""
    began = time.perf_counter()
    rank = made(sizes, ranks, optimizer)
    construction = time.perf_counter() - began
    operations = Operations()
    with operations:
        rank.step()
    began = time.perf_counter()
    rank.step()
    seconds = time.perf_counter() - began
    stats = rank.stats()
    return {
        "optimizer": optimizer,
        "ranks": ranks,
        "parameters": stats["parameters"],
        "padding": stats["padding"],
        "block_size": rank.frame.layout.block_size,
        "operations": operations.count,
        "largest_result": operations.largest,
        "state_bytes": stats["state_bytes"],
        "formula": model.memory(rank.frame.layout, optimizer).state,
        "wire_bytes": stats["wire_bytes"],
        "sent": stats["bytes_step"],
        "construction_and_two_steps_s": construction,
        "eager_step_s": seconds,
    }


def build_tables(sizes: tuple[int, ...], ranks: int) -> dict[str, Any]:
    """Builds everything that a layout has per block, and throws it away."""
    began = time.perf_counter()
    layout = layout_of(sizes, ranks)
    live = live_table(layout)
    slots, most = layout.scale_slots("block")
    owner = layout.block_tensor()
    seconds = time.perf_counter() - began
    assert (len(owner), len(slots), len(live.row)) == (layout.n_blocks,) * 3
    assert most == model.segments(layout)[2]
    return {
        "parameters": layout.real_numel,
        "ranks": ranks,
        "tensors": len(sizes),
        "blocks": layout.n_blocks,
        "seconds": seconds,
    }


# ---------------------------------------------------------------- what follows


def predict(sizes: tuple[int, ...], ranks: int, optimizer: str) -> dict[str, Any]:
    """One rank's step, from formulas."""
    layout = layout_of(sizes, ranks)
    memory = model.memory(layout, optimizer)
    message = model.message_bytes(layout)
    kernels = model.kernel_seconds(layout, optimizer)
    return {
        "optimizer": optimizer,
        "ranks": ranks,
        "parameters": layout.real_numel,
        "tensors": len(sizes),
        "block_size": layout.block_size,
        "padding": layout.numel / layout.real_numel - 1,
        "sent_per_bit": ranks * message * 8 / layout.real_numel,
        "state": memory.state,
        "tables": memory.tables + model.LAUNCHER_TABLES * layout.n_blocks,
        "of_ranks": memory.ranks,
        "scratch": memory.scratch,
        "kernels_s": kernels,
        "wire_s": model.wire_seconds(layout.numel, ranks, NETWORK),
    }


def predictions() -> Iterator[dict[str, Any]]:
    """All sizes and all counts of ranks."""
    for parameters in PARAMETERS:
        sizes = model.transformer(parameters)
        for ranks in RANKS:
            for optimizer in OPTIMIZERS:
                yield predict(sizes, ranks, optimizer)


# ---------------------------------------------------------------- tables


def _short(n: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.3g}"


def tables(found: dict[str, Any]) -> str:
    """The page's tables."""
    every = (_run_table(found["run"]), _built_table(found["built"]), _predicted_table(found["predicted"]))
    return "\n".join(map(markdown, every)).strip()


Rows = list[dict[str, Any]]
Table = Iterator[Sequence[Any]]


def _run_table(rows: Rows) -> Table:
    head = ("run here", "ranks", "block", "padding", "state, B/parameter", "formula", "operations a step")
    yield *head, "largest result, of P", "sent, bits per parameter", "a step here, s"
    for r in rows:
        p, equal = r["parameters"], r["state_bytes"] == r["formula"]
        yield (
            *(f"1-bit {'Adam' if r['optimizer'] == 'adam' else 'LAMB'}, {_short(p)}", f"{r['ranks']:,}"),
            *(r["block_size"], f"{r['padding'] / p:.1%}", f"{r['state_bytes'] / p:.3f}"),
            *("equal" if equal else f"{r['formula'] / p:.3f}", r["operations"], f"{r['largest_result'] / p:.2f}"),
            *(f"{8 * r['sent'] / p:.2f}", f"{r['eager_step_s']:.2f}"),
        )


def _built_table(rows: Rows) -> Table:
    yield "tables built here", "ranks", "tensors", "blocks", "s"
    for r in rows:
        yield _short(r["parameters"]), f"{r['ranks']:,}", r["tensors"], f"{r['blocks']:,}", f"{r['seconds']:.2f}"


def _predicted_table(rows: Rows) -> Table:
    head = ("predicted, 1-bit Adam", "ranks", "padding", "sent / bit", "state, GB", "tables, GB", "kernels, ms")
    yield *head, *(f"{name}, ms" for name in ("waits", "launches", "flat", "hierarchy", "Marsit", "bf16 all-reduce"))
    for r in (r for r in rows if r["optimizer"] == "adam" and r["ranks"] in (2, 64, 1024, 16384)):
        yield (
            *(_short(r["parameters"]), f"{r['ranks']:,}", f"{r['padding']:.0%}", f"{r['sent_per_bit']:.2f}"),
            *(f"{r['state'] / 1e9:.3g}", f"{r['tables'] / 1e9:.2g}"),
            *(f"{1e3 * s:,.3g}" for s in (*r["kernels_s"].values(), *r["wire_s"].values())),
        )


# ---------------------------------------------------------------- the picture


BLUES = {2: "#9ecae1", 64: "#4292c6", 1024: "#2171b5", 16384: "#08306b"}
WAYS = {
    "flat": ("1-bit, flat", METHODS["onebit-adam"], "-"),
    "hierarchical-bf16": ("1-bit, bf16 in node", lighter(METHODS["onebit-adam"]), "--"),
    "marsit-owner": ("Marsit, owner", METHODS["marsit"], "-"),
    "bf16": ("bf16 all-reduce", METHODS["bf16"], "-"),
}
GPU_MEMORY = 141


def plot(found: dict[str, Any], path: Path) -> None:
    """Draws four panels to a PNG."""
    rows = [r for r in found["predicted"] if r["optimizer"] == "adam"]
    figure, axes = plt.subplots(4, 1, figsize=(6.4, 16), layout="constrained")
    _kernels(axes[0], rows)
    _memory(axes[1], rows, found)
    _network(axes[2], rows)
    _overhead(axes[3], rows)
    clear(axes)
    for axis in axes:
        axis.legend(frameon=axis is axes[1], edgecolor="none", fontsize=9)
    figure.suptitle("One rank of 1-bit Adam: transformers, fp32, compression stage;\nH200, NVLink, 400 Gbit/s a node")
    save(figure, path, dpi=140)


def _of(rows: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    return [r for r in rows if r["ranks"] == ranks]


def _kernels(axis: Axes, rows: list[dict[str, Any]]) -> None:
    for ranks, colour in BLUES.items():
        some = _of(rows, ranks)
        x = [r["parameters"] for r in some]
        axis.plot(x, [1e3 * sum(r["kernels_s"].values()) for r in some], "o-", color=colour, label=f"{ranks:,} ranks")
        floor = [1e3 * r["kernels_s"]["memory"] for r in some]
        axis.plot(x, floor, ":", color=colour, linewidth=1, label="of that, memory traffic" if ranks == 2 else None)
    axis.set(xscale="log", yscale="log", xlabel="parameters", ylabel="ms a step, messages not counted")
    axis.set_title("Kernels and launches, predicted:\nlinear, above a fixed cost of launches", fontsize=10)


def _memory(axis: Axes, rows: list[dict[str, Any]], found: dict[str, Any]) -> None:
    def line(some: list[dict[str, Any]], key: str, label: str, style: str, **how: Any) -> None:
        axis.plot([r["parameters"] for r in some], [r[key] / 1e9 for r in some], style, label=label, **how)

    for ranks, colour in BLUES.items():
        line(_of(rows, ranks), "state", f"state, {ranks:,} ranks", "-", color=colour)
    line(_of(rows, 16384), "tables", "of that, tables (16,384 ranks)", "--", color="#b5651d")
    run = [r for r in found["run"] if r["optimizer"] == "adam"]
    line(run, "state_bytes", "run here, 2 to 16,384 ranks", "kx", markersize=7)
    axis.axhline(GPU_MEMORY, color="#b03a2e", linewidth=1)
    axis.text(1.5e8, GPU_MEMORY * 1.25, "memory of one H200", color="#b03a2e", fontsize=8.5)
    axis.set(xscale="log", yscale="log", xlabel="parameters", ylabel="GB", ylim=(4e-4, 2e4))
    axis.set_title("Memory: linear in parameters, not in ranks", fontsize=10)


def _network(axis: Axes, rows: list[dict[str, Any]]) -> None:
    some = [r for r in rows if 0.5e9 < r["parameters"] < 2e9]
    x = [r["ranks"] for r in some]
    for name, (label, colour, dashes) in WAYS.items():
        axis.plot(x, [1e3 * r["wire_s"][name] for r in some], dashes, color=colour, marker="o", label=label)
    axis.plot(x, [1e3 * sum(r["kernels_s"].values()) for r in some], "k:", marker="x", label="kernels and launches")
    axis.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ms a step")
    axis.set_xticks(x, [f"{n:,}" for n in x], fontsize=8.5)
    axis.set_title("Messages of $10^9$ parameters, by the planner's model:\nflat pays for each peer", fontsize=10)


def _overhead(axis: Axes, rows: list[dict[str, Any]]) -> None:
    for ranks, colour in BLUES.items():
        some = _of(rows, ranks)
        x = [r["parameters"] for r in some]
        axis.plot(x, [r["sent_per_bit"] for r in some], "o-", color=colour, label=f"{ranks:,} ranks")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="parameters", ylabel="bits on the wire for each parameter's one")
    axis.set_yticks([1, 1.5, 2, 3, 5, 10], ["1", "1.5", "2", "3", "5", "10"])
    axis.set_title("Headers, scales and padding of small models on many ranks", fontsize=10)


def everything(largest_built: int) -> dict[str, Any]:
    """Runs, builds and predicts."""
    sizes = model.transformer(4e6)
    run = [run_step(sizes, ranks, o) for o in OPTIMIZERS for ranks in (2, 64, 1024, 4096, 16384)]
    print(markdown(_run_table(run)), flush=True)
    counts = [10**n for n in range(6, 11) if 10**n <= largest_built]
    built = [build_tables(model.transformer(n), ranks) for n in counts for ranks in (2, 16384)]
    print(markdown(_built_table(built)), flush=True)
    return {"network": vars(NETWORK), "run": run, "built": built, "predicted": list(predictions())}


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank's step for any number of parameters and ranks.")
    parser.add_argument("--largest-built", type=float, default=1e10, help="parameters of the largest layout built")
    parser.add_argument("--redraw", action="store_true", help="run nothing: predictions, tables and picture anew")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.redraw:
        found = read(RESULTS) | {"predicted": list(predictions())}
    else:
        found = everything(int(arguments.largest_built))
    keep(found, RESULTS)
    print(markdown(_predicted_table(found["predicted"])))
    write_tables(PAGE, tables(found))
    plot(found, DOCS / "scale.png")


if __name__ == "__main__":
    main()
