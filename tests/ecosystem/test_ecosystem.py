"""The examples with other libraries run as they say; so do checkpoints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "ecosystem").glob("*.py"))
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone"],
    "accelerate launch": ["-m", "accelerate.commands.launch", "--main_process_port", "0"],  # any that is free
    "python": [],
}
FACTS = re.compile(
    r"rank (\d): loss ([\d.]+) -> ([\d.]+), phase (\S+), sent ([\d,]+) instead of ([\d,]+) bytes, parameters (\w{16})"
)


def run(*command: str) -> str:
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    paths = os.pathsep.join([str(ROOT / "examples" / "ecosystem"), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env=os.environ | environment | {"PYTHONPATH": paths},
    )
    assert result.returncode == 0, result.stderr
    assert "FusedOneBitWarning" not in result.stderr  # such as: DDP averages, although the optimizer compresses
    return result.stdout


def as_documented(example: Path) -> list[str]:
    """The command in an example's docstring, for this Python."""
    ((launcher, arguments),) = re.findall(
        rf"^({'|'.join(LAUNCHERS)}) (.*?)(?: {{2,}}.*)?$", example.read_text(), re.MULTILINE
    )
    return LAUNCHERS[launcher] + arguments.split()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.stem)
def test_example_learns_compresses_and_keeps_ranks_equal(example: Path, processes: int):
    output = run(*(as_documented(example) if processes == 2 else [str(example)]))
    facts = FACTS.findall(output)
    assert sorted(rank for rank, *_ in facts) == [str(rank) for rank in range(processes)]
    assert len({parameters for *_, parameters in facts}) == 1
    for _, first, last, phase, sent, fp32, _ in facts:
        print(f"{example.name} on {processes}: loss {first} -> {last}, {sent} of {fp32} bytes")
        assert float(last) < float(first) / 3
        assert phase == "compression"
        sent, fp32 = (int(n.replace(",", "")) for n in (sent, fp32))
        assert (0 < 5 * sent < fp32) if processes == 2 else sent == fp32 == 0  # of whole runs, warm-up included


def resumed(library: str, program: str, folder: Path) -> str:
    """What a program prints whose runs, whole and resumed, end with the same bits on both ranks."""
    launcher = "python" if library == "lightning" else "torchrun"
    processes = [] if library == "lightning" else ["--nproc-per-node", "2"]
    path = Path(__file__).parent / f"{program}_{library}.py"
    output = run(*LAUNCHERS[launcher], *processes, str(path), str(folder / "checkpoints"))
    digests = re.findall(r"whole (\w{64}) resumed (\w{64})", output)
    assert len(digests) == 2
    assert len({digest for pair in digests for digest in pair}) == 1
    return output


@pytest.mark.parametrize("library", ["accelerate", "lightning", "transformers"])
def test_a_resumed_compressed_run_continues_bit_for_bit(library: str, tmp_path: Path):
    output = resumed(library, "resume", tmp_path)
    why = "map_location" if library == "lightning" else "each rank must load the file that it saved itself"
    # Rank 0's file alone is not enough.
    assert 1 <= len(re.findall(rf"refused: .*{why}", output)) <= 2, output


@pytest.mark.parametrize("library", ["accelerate", "lightning", "transformers"])
def test_any_optimizers_gradients_are_compressed(library: str, tmp_path: Path):
    output = resumed(library, "compress", tmp_path)
    why = "compression of another model: 1.0.worker.numbers" if library == "lightning" else "rank-1-of-2.pt"
    assert len(re.findall(rf"refused: (?:(?!refused).)*{why}", output)) == 2, output  # lines of two may be one


@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
def test_optimizers_in_8_bits_take_gradients_in_4(library: str):
    pytest.importorskip(library)
    output = run(
        *LAUNCHERS["torchrun"], "--nproc-per-node", "2", str(Path(__file__).parent / "compress_8bit.py"), library
    )
    (first, *_), (last, *_), parameters = zip(
        *re.findall(r"loss ([\d.]+) -> ([\d.]+), parameters (\w{16})", output), strict=True
    )
    print(f"{library}: loss {first} -> {last}")
    assert float(last) < 0.7 * float(first)
    assert len(parameters) == 2
    assert len(set(parameters)) == 1
