"""``python -m benchmarks.gpu``: every kernel and the whole step on this machine's GPU, to one table.

Each kernel's time is set against the time in which a device copy, measured in the same run, moves
the bytes that the audit counts for it. ``--device cpu --numel 100000`` is a dry run of the code, on
the twins; it is labelled so and never written to the results.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from fusedonebit.triton_kernels import backend
from torch import Tensor

from fusedonebit import Lamb, MarsitAdam, MarsitSGD, OneBitAdam, OneBitLamb

from .device_timing import Call, copy_of, host_time, time_by_turns
from .loopback import Loopback
from .shapes import bert_large, sizes
from .workload import Workload

RESULTS = Path(__file__).with_name("results")
LIMITS = Path(__file__).with_name("limits.json")
FULL = 340_000_000
WORLD_SIZE = 8
GOAL = 0.95
# Name, op, dtype, and the audited case that says how many bytes an element moves.
KERNELS = [
    ("pack", "pack", torch.float32, "pack"),
    ("unpack", "unpack", torch.float32, "unpack"),
    ("flatten", "flatten", torch.float32, "flatten"),
    ("momentum_compress", "momentum_compress", torch.float32, "momentum_compress"),
    ("momentum_compress, preconditioned", "momentum_compress", torch.float32, "momentum_compress, preconditioned"),
    ("momentum_compress, bf16", "momentum_compress", torch.bfloat16, "momentum_compress, bf16"),
    ("finish", "finish", torch.float32, "finish"),
    ("server_reduce, W=8", "server_reduce", torch.float32, "server_reduce, W=8"),
    ("apply_momentum", "apply_momentum", torch.float32, "apply_momentum"),
    ("apply_momentum, preconditioned", "apply_momentum", torch.float32, "apply_momentum, preconditioned"),
    ("apply_momentum, bf16", "apply_momentum", torch.bfloat16, "apply_momentum, bf16"),
    ("adam_update", "adam_update", torch.float32, "adam_update"),
    ("lamb_update", "lamb_update", torch.float32, "lamb_update"),
    ("lamb_coefficient", "lamb_coefficient", torch.float32, "lamb_coefficient"),
    ("lamb_move", "lamb_move", torch.float32, "lamb_move"),
    ("lamb_ratio", "lamb_ratio", torch.float32, "lamb_ratio"),
    ("lamb_ratio, preconditioned", "lamb_ratio", torch.float32, "lamb_ratio, preconditioned"),
    ("lamb_rescale", "lamb_rescale", torch.float32, "lamb_rescale"),
]


def about(device: torch.device) -> dict[str, Any]:
    """What ran, and on what."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine() + " CPU",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "torch": torch.__version__,
        "triton": __import__("triton").__version__ if cuda else None,
        "python": platform.python_version(),
        "commit": _output("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "backend": backend(device),
        "date": datetime.date.today().isoformat(),
        "dry_run": not cuda,
    }


def _output(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip().splitlines()[0]


def kernel_rows(numel: int, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Every kernel by turns with a copy of as many bytes."""
    audited = json.loads(LIMITS.read_text())["sm_90"]
    rows = []
    for name, op, dtype, case in KERNELS:
        server = op == "server_reduce"
        work = Workload((numel,), device, WORLD_SIZE if server else 1, dtype, preconditioned="preconditioned" in case)
        elements = work.layout.chunk_numel if server else work.layout.numel
        per_element = audited[case]["bytes_per_element"]
        moved = per_element * elements
        # `finish` moves so little that its copy would be a launch and nothing else; it is timed all the same.
        timed = time_by_turns({"kernel": work.call(op), "copy": copy_of(moved, device)}, device, rounds)
        kernel, copy = timed["kernel"], timed["copy"]
        row = {"kernel": name, "elements": elements, "bytes_per_element": per_element, "ms": asdict(kernel)}
        row |= {"GB_per_s": moved / kernel.median / 1e6, "copy_ms": asdict(copy)}
        rows.append(row | {"share_of_copy": copy.median / kernel.median})
        del work
    return rows


def _optimizer_peers(shapes: list[tuple[int, ...]], device: torch.device) -> dict[str, Call]:
    def params() -> list[Tensor]:
        made = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        for p in made:
            p.grad = torch.randn_like(p)
        return made

    adamw = torch.optim.AdamW(params(), lr=1e-5, fused=True)
    peers: dict[str, Call] = {"AdamW(fused=True).step()": adamw.step}
    # beta3 = 0: one step of warm-up is no average of anything.
    for kind, options in ((OneBitAdam, {}), (OneBitLamb, {"beta3": 0.0})):
        alone = kind(params(), lr=1e-5, freeze_step=1, **options)
        share = kind(params(), lr=1e-5, freeze_step=1, process_group=Loopback(WORLD_SIZE), **options)
        for optimizer in (alone, share):
            optimizer.step()
            optimizer.step()
            stats = optimizer.stats()
            assert (stats["phase"], stats["skipped_steps"]) == ("compression", 0)
        name = kind.__name__
        peers[f"{name}.step(), W=1"] = alone.step
        peers[f"{name}.step(), one rank of W={WORLD_SIZE}, messages copied on the device"] = share.step
        work = Workload(sizes(shapes), device, WORLD_SIZE, preconditioned=alone.options.precondition)
        peers[f"kernels of one rank of W={WORLD_SIZE}, {name}"] = work.step(lamb=kind is OneBitLamb)
    for kind in (MarsitSGD, MarsitAdam):
        alone = kind(params(), lr=1e-5, full_precision_every=0)
        share = kind(params(), lr=1e-5, full_precision_every=0, process_group=Loopback(WORLD_SIZE))
        peers[f"{kind.__name__}.step(), W=1"] = alone.step
        peers[f"{kind.__name__}.step(), one rank of W={WORLD_SIZE}, messages copied on the device"] = share.step
    lamb = Lamb(params(), lr=1e-5)
    lamb.step()
    return peers | {"Lamb.step(), W=1": lamb.step}


def step_rows(shapes: list[tuple[int, ...]], device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """The whole step against torch's fused AdamW, by turns."""
    peers = _optimizer_peers(shapes, device)
    timed = time_by_turns(peers, device, rounds)
    base = next(iter(timed.values())).median
    return [
        {"step": name, "ms": asdict(t), "ratio_to_adamw": t.median / base, "host_ms": host_time(peers[name], device)}
        for name, t in timed.items()
    ]


def sweep(numel: int, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Bandwidth of each kernel by size, up to ``numel``, in a full run to 10^9."""
    # A full run goes on to 10^9, where buffers of the largest kernel take 28 GB.
    points = [n for n in (10**4, 10**5, 10**6, 10**7, 10**8) if n < numel] + [numel] + [10**9] * (numel >= FULL)
    return [
        {"kernel": r["kernel"], "elements": r["elements"], "GB_per_s": r["GB_per_s"], "share": r["share_of_copy"]}
        for n in points
        for r in kernel_rows(n, device, rounds)
    ]


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    facts = report["about"]
    title = "DRY RUN on the CPU through the twins: no result" if facts["dry_run"] else facts["device"]
    lines = [f"# {title}", "", ", ".join(f"{k}: {v}" for k, v in facts.items() if v is not None), ""]
    lines += [f"Copy: {report['copy_GB_per_s']:.0f} GB/s, read and written ({report['numel']:,} float32 elements).", ""]
    lines += ["Times are medians (10th to 90th percentile).", ""]
    lines += [
        "| kernel | elements | B/element | ms | GB/s | share of a copy of the same bytes |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for r in report["kernels"]:
        lines.append(
            f"| {r['kernel']} | {r['elements']:,} | {r['bytes_per_element']:.3f} | {_spread(r['ms'])} "
            f"| {r['GB_per_s']:.0f} | {r['share_of_copy']:.3f} |"
        )
    goal = f"goal {GOAL} x for one rank of 8 (at world size 1 both sides compress on it)"
    lines += ["", f"Compression-stage step, {report['step_model']}, {goal}:", ""]
    lines += ["| step | ms | x AdamW(fused=True) | host ms |", "|---|--:|--:|--:|"]
    for r in report["steps"]:
        lines.append(f"| {r['step']} | {_spread(r['ms'])} | {r['ratio_to_adamw']:.3f} | {r['host_ms']:.3f} |")
    return "\n".join(lines) + "\n"


def _spread(ms: dict[str, float]) -> str:
    return f"{ms['median']:.3f} ({ms['low']:.3f} to {ms['high']:.3f})"


def plot(report: dict[str, Any], path: Path) -> None:
    """The roofline: bandwidth by size under the copy's; nothing where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print("no roofline plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name in dict.fromkeys(p["kernel"] for p in report["sweep"]):
        points = [(p["elements"], p["GB_per_s"]) for p in report["sweep"] if p["kernel"] == name]
        axes.loglog(*zip(*points, strict=True), marker="o", label=name)
    axes.axhline(report["copy_GB_per_s"], color="black", linestyle="--", label="device copy")
    axes.set(xlabel="elements", ylabel="GB/s, read and written", title=report["about"]["device"])
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    print(path)


def measure(device: torch.device, numel: int, rounds: int) -> dict[str, Any]:
    """Runs everything."""
    copy = time_by_turns({"copy": copy_of(8 * numel, device)}, device, rounds)["copy"]
    full = numel >= FULL
    shapes = bert_large() if full else [(numel // 2,), (numel // 4,), (7,)]
    report = {"about": about(device), "numel": numel, "copy_GB_per_s": 8 * numel / copy.median / 1e6}
    report |= {"copy_ms": asdict(copy), "kernels": kernel_rows(numel, device, rounds)}
    report["step_model"] = (
        f"{'BERT-Large' if full else 'a toy'}: {sum(sizes(shapes)):,} parameters in {len(shapes)} tensors, fp32"
    )
    report["steps"] = step_rows(shapes, device, rounds)
    report["sweep"] = sweep(numel, device, max(3, rounds // 3))
    return report


def main(arguments: list[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Measure every kernel and the whole step.")
    parser.add_argument("--out", type=Path, help="folder for the report (default: benchmarks/results)")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run")
    parser.add_argument("--numel", type=int, default=FULL, help="elements of each kernel's tensor")
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    dry = device.type != "cuda"
    if not dry and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --numel 100000 is a dry run of the code")
    if dry and given.out is not None and given.out.resolve() == RESULTS:
        parser.error("a dry run is no result: give another --out, or none")
    report = measure(device, given.numel, given.rounds)
    text = table(report)
    print(text)
    folder = given.out or (None if dry else RESULTS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        facts = report["about"]
        name = "dry-run" if dry else re.sub(r"\W+", "-", facts["device"].lower()).strip("-") + "-" + facts["date"]
        (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        (folder / f"{name}.md").write_text(text)
        plot(report, folder / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
