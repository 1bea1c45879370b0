"""Hosts with a slow network between them, on one machine: rate-limited network namespaces (Linux, root)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

SUBNET = "10.77.0"
TAG = "fob"
"""Of the names of what is made here; the id of the process that made it follows."""


CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""That network namespaces need, by their bits (linux/capability.h)."""


@dataclass(frozen=True)
class Host:
    """Where a process runs: what its command begins with, its address and its interface."""

    prefix: tuple[str, ...]
    address: str
    interface: str


def lacking() -> list[str]:
    """The rights and programs that this process needs to make namespaces, and does not have."""
    missing = [f"the capability {name}" for name, bit in CAPABILITIES.items() if not _capabilities() >> bit & 1]
    rights = ["root's rights"] if os.geteuid() != 0 else missing
    return rights + [f"iproute2's {name}" for name in ("ip", "tc") if not shutil.which(name)]


def _capabilities() -> int:
    """Those of this process, as bits: a container's root lacks some."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff")), 16)


def can_limit() -> bool:
    """Whether this process may make namespaces, and has the programs to."""
    return not lacking()


@contextmanager
def hosts(count: int, megabits: float | None, even: bool = False) -> Iterator[list[Host]]:
    """``count`` hosts whose network cards send and receive ``megabits`` per second; None: this machine's loopback.

    Args:
        count: Of hosts.
        megabits: Per second, Ethernet's headers included.
        even: The rate holds for small messages as well: half a millisecond of it may pass at once after a pause,
            not twenty. And TCP's congestion control is Linux's own (cubic), whatever this machine prefers.
    """
    if megabits is None:
        yield [Host((), "127.0.0.1", "lo")] * count
        return
    _remove_what_was_left()
    tag = f"{TAG}{os.getpid()}"
    try:
        _run("ip", "link", "add", tag, "type", "bridge")
        _run("ip", "link", "set", tag, "up")
        yield [_host(tag, i, megabits, even) for i in range(count)]
    finally:
        _remove(tag)


def _remove_what_was_left() -> None:
    """By processes that were killed before they could."""
    for tag in _output("ip", "-brief", "link", "show", "type", "bridge").split():
        if (found := re.fullmatch(rf"{TAG}(\d+)", tag)) and not os.path.exists(f"/proc/{found[1]}"):
            _remove(tag)


def _remove(tag: str) -> None:
    commands = [["ip", "link", "del", tag]]
    for line in _output("ip", "netns", "list").splitlines():
        if line.startswith(f"{tag}-"):
            space = line.split()[0]
            # A namespace takes its links with it, but later than the next host may want their names.
            commands += [["ip", "link", "del", f"v{space.removeprefix(TAG)}"], ["ip", "netns", "del", space]]
    for command in commands:
        subprocess.run(command, stderr=subprocess.DEVNULL, check=False)


def _host(bridge: str, i: int, megabits: float, even: bool) -> Host:
    space, outer = f"{bridge}-{i}", f"v{os.getpid()}-{i}"
    # What may pass at once after a pause: 20 ms of it, or a slow network would not be slow for small messages.
    # At least two packets of it, or nothing would pass at all.
    half_a_millisecond = max(3200.0, 62.5 * megabits)
    burst = f"{half_a_millisecond:.0f}b" if even else f"{min(256.0, 2.56 * megabits):g}kb"
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
    if even:
        _run(*inside, "ip", "route", "change", f"{SUBNET}.0/24", "dev", "eth0", "congctl", "cubic")
        # TCP leaves large packets to network cards to cut up. A token bucket cuts up what is larger than its
        # burst, on the way and slowly: from 200 Mbit/s on links would not reach their rate.
        largest = min(65536, int(0.8 * half_a_millisecond))
        _run(*inside, "ip", "link", "set", "eth0", "gso_max_size", str(largest))
    return Host(inside, f"{SUBNET}.{i + 1}", "eth0")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _output(*command: str) -> str:
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout


def run_module(
    module: str,
    count: int,
    megabits: float | None,
    arguments: Sequence[str] = (),
    port: int = 29577,
    timeout: float = 900.0,
    even: bool = False,
    mpi: bool = False,
) -> str:
    """Runs ``python -m module`` on each host, as torchrun would; returns what rank 0 prints.

    With ``mpi`` it is Open MPI's ``mpirun`` that starts the hosts' processes, and the output is that of all ranks.

    Raises:
        RuntimeError: if any process fails, with what it wrote; the others are ended.
        TimeoutError: if they take longer than ``timeout`` seconds.
    """
    with hosts(count, megabits, even) as places, ExitStack() as stack:
        shared = {"MASTER_ADDR": places[0].address, "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        shared["GLOO_SOCKET_IFNAME"] = places[0].interface
        python = [sys.executable, "-m", module, *arguments]
        if mpi:
            command, more = _mpirun(places, python)
            starts = [(command, more | shared)]
        else:
            starts = [([*host.prefix, *python], {"RANK": str(rank)} | shared) for rank, host in enumerate(places)]
        # Files, not pipes: a rank that writes much must not wait for one that is read first.
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2 * len(starts))]
        processes = [
            subprocess.Popen(command, env={**os.environ, **more}, stdout=outputs[2 * i], stderr=outputs[2 * i + 1])
            for i, (command, more) in enumerate(starts)
        ]
        try:
            failed = _wait(processes, time.monotonic() + timeout)
        finally:
            _end(processes)
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read())
    if failed:
        who = "mpirun" if mpi else "rank"
        told = "\n".join(f"{who} {i} of {module} failed:\n{texts[2 * i + 1]}" for i in failed)
        raise RuntimeError(told)
    return texts[0]


def _mpirun(places: Sequence[Host], python: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """A command that starts one process on each host, and its environment."""
    command, more = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "pml", "ob1"], {}
    # Neither shared memory nor another interface: what ranks send crosses the limited links.
    command += ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", places[0].interface]
    if places[0].prefix:
        # Ranks find mpirun, which is on no host, at the bridge.
        bridge = f"{TAG}{os.getpid()}"
        _run("ip", "addr", "add", f"{SUBNET}.254/24", "dev", bridge)
        more = {"PMIX_MCA_ptl_base_if_include": bridge, "PMIX_MCA_ptl_base_remote_connections": "1"}
    for host in places:
        command += ["-n", "1", *host.prefix, *python, ":"]
    return command[:-1], more


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """mpirun ends its ranks if it is asked to, and not if it is killed; who is asked in vain is killed."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + 5.0
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(processes: Sequence[subprocess.Popen], until: float) -> list[int]:
    """Returns when all have ended, or one has failed; which have."""
    while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
        if time.monotonic() > until:
            raise TimeoutError("the hosts did not finish in time")
        time.sleep(0.1)
    return [rank for rank, process in enumerate(processes) if process.poll()]
