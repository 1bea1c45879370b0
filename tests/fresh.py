"""Runs programs as a stranger does: in an interpreter that has imported nothing of this package, and nothing beside it.

``Server`` is one process that has run a first program, such as ``TORCH``: that imports torch, and what torch's own
optimizers import, and nothing else. Each program runs in a fork of it: as fresh as a new interpreter, as far as this
package is concerned, within milliseconds instead of the seconds that torch's import takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parent.parent

TORCH = """
import torch, torch.distributed, torch.distributed.run
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
assert not [name for name in sys.modules if name.startswith("fusedonebit")]
"""
SERVER = """
import json, os, runpy, signal, sys
exec(sys.argv[1])
print("ready", flush=True)

def run(program, folder, rank, environment, seconds):
    signal.alarm(seconds)
    os.chdir(folder)
    os.environ.update(environment)
    file = os.open(f"{program}.{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.argv = [program]
    sys.path[0] = folder
    runpy.run_path(program, run_name="__main__")

for line in sys.stdin:
    program, folder, environments, seconds = json.loads(line)
    children = []
    for rank, environment in enumerate(environments):
        child = os.fork()
        if not child:
            try:
                run(program, folder, rank, environment, seconds)
                code = 0
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                code = 1
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(codes), flush=True)
"""


def environment() -> dict[str, str]:
    """A user's: without what tests set, such as Triton's interpreter."""
    kept = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    return kept | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


class Server:
    """Runs programs in forks of a process that has run a ``first`` one."""

    def __init__(self, first: str = TORCH, **variables: str) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", SERVER, first]
        self._server = subprocess.Popen(command, cwd=ROOT, env=environment() | variables, **pipes)
        assert self._server.stdout.readline() == "ready\n"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        self._server.wait(10)
        self._server.stdout.close()

    def run(self, code: str, folder: Path, ranks: int = 0, seconds: int = 120) -> str:
        """Runs a program in a folder, on so many ranks, or 0: alone; returns what it has written, rank by rank.

        AssertionError, with that, if one fails, or does not end in time.
        """
        shared: dict[str, str] = {}
        if ranks:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
            shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"}
        each = [shared | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}) for rank in range(ranks or 1)]
        return "".join(self.at_once(code, folder, each, seconds))

    def at_once(self, code: str, folder: Path, environments: list[dict[str, str]], seconds: int = 120) -> list[str]:
        """Runs a program at the same time in processes with these variables as well; see ``run``."""
        program = folder / "program.py"
        program.write_text(code)
        print(json.dumps([str(program), str(folder), environments, seconds]), file=self._server.stdin, flush=True)
        codes = json.loads(self._server.stdout.readline())
        written = [Path(f"{program}.{number}.txt").read_text() for number in range(len(environments))]
        assert not any(codes), f"ended with {codes}:\n{code}\n{''.join(written)}"
        return written
