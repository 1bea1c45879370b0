"""Hosts with a slow network between them, on one machine: rate-limited network namespaces (Linux, root)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

SUBNET = "10.77.0"


@dataclass(frozen=True)
class Host:
    """Where a process runs: what its command begins with, its address and its interface."""

    prefix: tuple[str, ...]
    address: str
    interface: str


def can_limit() -> bool:
    """Whether this process may make namespaces, and has the programs to."""
    return os.geteuid() == 0 and bool(shutil.which("ip")) and bool(shutil.which("tc"))


@contextmanager
def hosts(count: int, megabits: float | None) -> Iterator[list[Host]]:
    """``count`` hosts whose network cards send and receive ``megabits`` per second; None: this machine's loopback."""
    if megabits is None:
        yield [Host((), "127.0.0.1", "lo")] * count
        return
    tag = f"fob{os.getpid()}"
    try:
        _run("ip", "link", "add", tag, "type", "bridge")
        _run("ip", "link", "set", tag, "up")
        yield [_host(tag, i, megabits) for i in range(count)]
    finally:
        for i in range(count):
            subprocess.run(["ip", "netns", "del", f"{tag}-{i}"], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["ip", "link", "del", tag], stderr=subprocess.DEVNULL, check=False)


def _host(bridge: str, i: int, megabits: float) -> Host:
    space, outer = f"{bridge}-{i}", f"v{os.getpid()}-{i}"
    # What may pass at once after a pause: 20 ms of it, or a slow network would not be slow for small messages.
    burst = f"{min(256.0, 2.56 * megabits):g}kb"
    limit = ("root", "tbf", "rate", f"{megabits:g}mbit", "burst", burst, "latency", "400ms")
    inside = ("ip", "netns", "exec", space)
    _run("ip", "netns", "add", space)
    _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
    _run("ip", "link", "set", outer, "master", bridge, "up")
    _run(*inside, "ip", "addr", "add", f"{SUBNET}.{i + 1}/24", "dev", "eth0")
    _run(*inside, "ip", "link", "set", "eth0", "up")
    _run(*inside, "ip", "link", "set", "lo", "up")
    _run(*inside, "tc", "qdisc", "add", "dev", "eth0", *limit)
    _run("tc", "qdisc", "add", "dev", outer, *limit)
    return Host(inside, f"{SUBNET}.{i + 1}", "eth0")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def run_module(
    module: str,
    count: int,
    megabits: float | None,
    arguments: Sequence[str] = (),
    port: int = 29577,
    timeout: float = 900.0,
) -> str:
    """Runs ``python -m module`` on each host, as torchrun would; returns what rank 0 prints.

    Raises:
        RuntimeError: if any process fails, with what it wrote; the others are ended.
        TimeoutError: if they take longer than ``timeout`` seconds.
    """
    with hosts(count, megabits) as places, ExitStack() as stack:
        shared = {"MASTER_ADDR": places[0].address, "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        # Files, not pipes: a rank that writes much must not wait for one that is read first.
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2 * count)]
        processes = [
            subprocess.Popen(
                [*host.prefix, sys.executable, "-m", module, *arguments],
                env={**os.environ, **shared, "RANK": str(rank), "GLOO_SOCKET_IFNAME": host.interface},
                stdout=outputs[rank],
                stderr=outputs[count + rank],
            )
            for rank, host in enumerate(places)
        ]
        try:
            failed = _wait(processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read())
    if failed:
        told = "\n".join(f"rank {rank} of {module} failed:\n{texts[count + rank]}" for rank in failed)
        raise RuntimeError(told)
    return texts[0]


def _wait(processes: Sequence[subprocess.Popen], until: float) -> list[int]:
    """Returns when all have ended, or one has failed; which have."""
    while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
        if time.monotonic() > until:
            raise TimeoutError("the hosts did not finish in time")
        time.sleep(0.1)
    return [rank for rank, process in enumerate(processes) if process.poll()]
