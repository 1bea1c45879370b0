"""What this package offers works alone, in a process that has imported nothing of it: names, commands, pages' code.

Each case is a program of its own; ``fresh`` says what it runs in. A seeded sample is in `make test`, all in
`make test-long`, where they take about two minutes of a processor.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pages
import pytest
import torch
from fresh import ROOT, Server, environment
from optimizers import EVERY

import fusedonebit

SEED, SAMPLED = 0, 5

START = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
def train(optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
    return optimizer
def refused(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("not refused")
"""
STEPS = "before = model.weight.clone(); train({}, 3); assert not torch.equal(before, model.weight)"

OPTIMIZERS = [kind.__name__ for kind in EVERY]
GIVEN = {"OneBitMuon": "[model.weight]"}
OBJECTS = {
    "Faults": "OneBitAdam(model.parameters(), faults=fusedonebit.Faults(guard='off'))",
    "Freeze": "OneBitAdam(model.parameters(), freeze_step=fusedonebit.Freeze(step=2))",
    "Layerwise": "OneBitLamb(model.parameters(), layerwise=fusedonebit.Layerwise(c_max=2.0))",
    "Numerics": "AdamW(model.parameters(), numerics=fusedonebit.Numerics(state='8bit'))",
    "Rounds": "MarsitSGD(model.parameters(), rounds=fusedonebit.Rounds(local_steps=2))",
    "Wire": "OneBitAdam(model.parameters(), wire=fusedonebit.Wire(buckets=1))",
}
ADAM = "optimizer = train(fusedonebit.OneBitAdam(model.parameters()))"
LION = "optimizer = fusedonebit.OneBitLion(model.parameters())"
POLICY = "train(fusedonebit.ZeroOneAdam(model.parameters(), variance_policy={}, sync_policy={}), 3)"
PROGRESS = "done = fusedonebit.policies.Progress(3, 3, 1, 2)"
VARIANCE, EVERY = "fusedonebit.policies.DoublingVariance()", "fusedonebit.policies.EveryStep()"
WRAPPED = """
import torch.distributed as dist
dist.init_process_group('gloo', init_method='file://' + __file__ + '.store', rank=0, world_size=1)
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = fusedonebit.OneBitAdam(wrapped.parameters())
{}
wrapped(torch.ones(3, 4)).sum().backward()
{}
dist.destroy_process_group()"""
NAMES = {
    **{name: STEPS.format(f"fusedonebit.{name}({GIVEN.get(name, 'model.parameters()')})") for name in OPTIMIZERS},
    **{name: STEPS.format(f"fusedonebit.{made}") for name, made in OBJECTS.items()},
    **{
        name: f"refused(fusedonebit.{name}, lambda: (_ for _ in ()).throw(fusedonebit.{name}('told')))"
        for name in ("AbortedStepError", "CollectiveError", "DisagreementError", "OutOfStepError")
    },
    "CheckpointError": f"{ADAM}; assert issubclass(fusedonebit.CheckpointError, Exception)",
    "FusedOneBitWarning": "import warnings; warnings.warn('told', fusedonebit.FusedOneBitWarning)",
    "NonFiniteGradientError": (
        "o = fusedonebit.OneBitAdam(model.parameters(), faults=fusedonebit.Faults(nonfinite='raise'))\n"
        "model.weight.grad = torch.full_like(model.weight, torch.nan)\n"
        "model.bias.grad = torch.zeros_like(model.bias)\nrefused(fusedonebit.NonFiniteGradientError, o.step)"
    ),
    "Recorder": (
        "recorder = fusedonebit.Recorder('run', fusedonebit.AdamW(model.parameters()))\n"
        "recorder.log(1, loss=1.0)\nrecorder.close()"
    ),
    "__version__": "assert fusedonebit.__version__.count('.') == 2",
    "broadcast_buffers": "fusedonebit.broadcast_buffers(torch.nn.BatchNorm1d(3))",
    "compress": WRAPPED.format("fusedonebit.compress(wrapped, 8)", "torch.optim.SGD(wrapped.parameters(), 0.1).step()"),
    "amp": "fusedonebit.amp.GradScaler('cpu')",
    "amp.GradScaler": (
        "o = fusedonebit.OneBitAdam(model.parameters())\nscaler = fusedonebit.amp.GradScaler('cpu')\n"
        "scaler.scale(model(torch.ones(3, 4)).sum()).backward()\nscaler.step(o)\nscaler.update()"
    ),
    "dcp": "fusedonebit.dcp.save(model, fusedonebit.OneBitAdam(model.parameters()), 'saved')",
    "dcp.save": f"{ADAM}; fusedonebit.dcp.save(model, optimizer, 'saved', step=1)",
    "dcp.load": (
        f"{ADAM}; fusedonebit.dcp.save(model, optimizer, 'saved', step=1)\n"
        "assert fusedonebit.dcp.load(model, optimizer, 'saved', step=0)['step'] == 1"
    ),
    "dcp.async_save": f"{LION}; fusedonebit.dcp.async_save(model, train(optimizer), 'saved').result()",
    "dcp.state_of": f"{ADAM}; assert fusedonebit.dcp.state_of(model, optimizer).keys() == {{'model', 'optimizer'}}",
    "dcp.template": (
        f"{ADAM}; fusedonebit.dcp.save(model, optimizer, 'saved')\n"
        "fusedonebit.dcp.template(model, optimizer, 'saved', prefix='optimizer')"
    ),
    "ddp": "fusedonebit.ddp.attach",
    "ddp.attach": WRAPPED.format("fusedonebit.ddp.attach(wrapped, optimizer)", "optimizer.step()"),
    "ddp.Handle": WRAPPED.format(
        "handle = fusedonebit.ddp.attach(wrapped, optimizer)\nassert isinstance(handle, fusedonebit.ddp.Handle)\n"
        "handle.detach()",
        "torch.optim.AdamW(wrapped.parameters()).step()",
    ),
    "policies": "fusedonebit.policies.FixedRounds(2)",
    "policies.AlignedRounds": POLICY.format(VARIANCE, f"fusedonebit.policies.AlignedRounds({EVERY}, 2)"),
    "policies.DoublingRounds": POLICY.format(VARIANCE, "fusedonebit.policies.DoublingRounds(1, 1)"),
    "policies.DoublingVariance": POLICY.format(VARIANCE, EVERY),
    "policies.EveryStep": POLICY.format(None, EVERY),
    "policies.FixedRounds": POLICY.format(VARIANCE, "fusedonebit.policies.FixedRounds(2)"),
    "policies.Progress": PROGRESS,
    "policies.Round": f"{PROGRESS}; done.after(fusedonebit.policies.Round(False, 1), 1)",
    "policies.SyncPolicy": "assert issubclass(fusedonebit.policies.EveryStep, object); fusedonebit.policies.SyncPolicy",
    "policies.VariancePolicy": "fusedonebit.policies.VariancePolicy",
    "policies.check_policies": f"fusedonebit.policies.check_policies({VARIANCE}, {EVERY})",
    "policies.next_round": f"{PROGRESS}; fusedonebit.policies.next_round({VARIANCE}, {EVERY}, done)",
    "policies.planned": f"{PROGRESS}; fusedonebit.policies.planned({VARIANCE}, {EVERY}, done)",
    "policies.progress_after": f"fusedonebit.policies.progress_after({VARIANCE}, {EVERY}, 5)",
    "recording": "fusedonebit.recording.Recorder",
    "recording.Recorder": "fusedonebit.recording.Recorder('run', fusedonebit.OneBitLion(model.parameters())).close()",
    "recording.scalars": f"{ADAM}; assert fusedonebit.recording.scalars(optimizer)",
    "recording.describe": f"{ADAM}; assert fusedonebit.recording.describe(optimizer)",
    "recording.read_lines": (
        "from pathlib import Path\nPath('lines').write_text('{}')\n"
        "assert len(list(fusedonebit.recording.read_lines(Path('lines')))) == 1"
    ),
    "checkpoint.forget_checksums": (f"{ADAM}; fusedonebit.checkpoint.forget_checksums(optimizer.state_dict())"),
    "checkpoint.header_of": f"{ADAM}; fusedonebit.checkpoint.header_of(optimizer.state_dict())",
    "checkpoint.KEY": "fusedonebit.checkpoint.KEY",
    "checkpoint.FORMAT": "fusedonebit.checkpoint.FORMAT",
    "deepspeed.DeepSpeedRounds": "fusedonebit.deepspeed.DeepSpeedRounds(100, 32, 16)",
    "deepspeed.DeepSpeedVariance": "fusedonebit.deepspeed.DeepSpeedVariance(100, 16)",
    "deepspeed.from_config": (
        "train(fusedonebit.deepspeed.from_config(model.parameters(), {'type': 'ZeroOneAdam', 'params': {}}), 3)"
    ),
    "deepspeed.schedule": (
        "from fusedonebit.deepspeed import schedule\n"
        "schedule(fusedonebit.OneBitAdam(model.parameters()), {'type': 'WarmupLR', 'params': {}})"
    ),
    "apps.plan.choose_topology": "from fusedonebit.apps.plan import choose_topology; choose_topology(10**6, 8)",
}
"""A small use of each public name, behind ``START`` and ``import fusedonebit``."""

CALLS = {
    "step": "optimizer.step()",
    "zero_grad": "optimizer.zero_grad()",
    "stats": "assert optimizer.stats()['step'] == 1",
    "state_dict": "assert optimizer.state_dict()['state']",
    "load_state_dict": "optimizer.load_state_dict(optimizer.state_dict())",
    "add_param_group": "new().add_param_group({'params': [torch.nn.Parameter(torch.ones(3, 3))]})",
    "momentum": "assert optimizer.momentum(model.weight).shape == (2, 4)",
    "worker_error": "optimizer.worker_error(model.weight)",
    "compensation": "optimizer.compensation(model.weight)",
    "masters_of_rank": "optimizer.masters_of_rank",
    "phase": "assert isinstance(optimizer.phase, str)",
    "last_grad_norm": "optimizer.last_grad_norm",
    "no_sync": "with new(wire=fusedonebit.Wire(overlap=True, buckets=2)).no_sync(): pass",
    "__repr__": "assert type(optimizer).__name__ in repr(optimizer)",
    "__deepcopy__": "import copy; copy.deepcopy((model, optimizer))",
    "__getstate__": "import pickle; pickle.loads(pickle.dumps(optimizer))",
}
"""What users do with an optimizer that has taken a step."""

CALLED = """
import os
new = lambda **options: fusedonebit.{kind}({given}, **options)
optimizer = train(new())
for name, code in {calls!r}.items():
    child = os.fork()  # each alone
    if not child:
        exec(code)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""

GROUP = (
    "refused(ValueError, lambda: fusedonebit.AdamW([{'params': model.parameters(), 'sync_policy': None}]))\n"
    "refused(ValueError, lambda: fusedonebit.AdamW([{'params': model.parameters(), 'topology': 'ring'}]))"
)
ASKED = {
    "an option of another in a group": GROUP,
    "an option of another": (
        "told = refused(TypeError, lambda: fusedonebit.AdamW(model.parameters(), topology='ring'))\n"
        "assert told.endswith('MarsitAdam and MarsitSGD have: topology=...')"
    ),
    "a numeric checkpoint": f"{ADAM}; torch.save(optimizer.state_dict(), 'f'); torch.load('f')",
}

COMMANDS = {
    "train": f"train --out runs/new --optimizer onebit-adam {' '.join(pages.FAST)} --text my.txt --freeze-step 6",
    "train, 0/1 Adam": f"train --out runs/new --optimizer zero-one-adam {' '.join(pages.FAST)} --text my.txt",
    "report": "report runs/adam runs/lamb --out page.html",
    "plan": "plan --params 340M --gpus 64 --gpus-per-node 8 --network 10Gbps --step-ms 363",
    "plan, all, drawn": "plan --params 1.2B --gpus 8 --calibrate step_fp32=6.4,one_gpu=1.4 --all --out drawn",
    "migrate": "migrate ds_config.json",
    **{f"{name} --help": f"{name} --help" for name in ("train", "report", "plan", "migrate")},
    "--help": "--help",
    "--version": "--version",
}
MAIN = "import sys\nfrom fusedonebit.apps.cli import main\nif __name__ == '__main__':\n    sys.exit(main({!r}))"
"""What the console script does."""


def documented() -> dict[str, str]:
    """Programs that import each name of docs/api alone, but for the ops, which one module makes."""
    found = {}
    for page in sorted((ROOT / "docs" / "api").glob("*.rst")):
        for kind, path in re.findall(r"^\.\. auto(\w+):: ([\w.]+)$", page.read_text(), re.MULTILINE):
            module, _, name = path.rpartition(".")
            if kind == "module":
                found[path] = f"import {path}"
            elif module != "fusedonebit.triton_kernels" and "mpi" not in module and path.partition(".")[2] not in NAMES:
                found[path] = f"from {module} import {name}"
    return found


def names(code: str) -> tuple[set[str], set[str]]:
    """The names that a program binds, and those that it uses before it does."""
    made: set[str] = set()
    used: set[str] = set(dir(builtins))
    wanted: set[str] = set()
    for statement in ast.parse(code).body:
        nodes = list(ast.walk(statement))
        read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        bound |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        imported = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
        bound |= {(each.asname or each.name).partition(".")[0] for node in imported for each in node.names}
        own = {node.arg for node in nodes if isinstance(node, ast.arg)}
        own |= bound if hasattr(statement, "body") else set()  # of a loop, a class, a function
        wanted |= read - made - own - used
        made |= bound
    return made, wanted


def pasted(blocks: list[pages.Block], block: pages.Block, page: str) -> str:
    """A block, behind those before it that have the names it uses; behind all where hidden code comes before it."""
    before = blocks[: blocks.index(block)]
    if not (before and hidden(before[-1], page)):
        wanted, earlier, before = names(block.text)[1], before, []
        for each in reversed(earlier):
            made, needed = names(each.text)
            if made & wanted:
                wanted = wanted - made | needed
                before.insert(0, each)
    code = "\n".join(each.text for each in [*before, block])
    return code if torch.cuda.is_available() else code.replace('"cuda"', '"cpu"')


def hidden(block: pages.Block, page: str) -> bool:
    """Whether no reader sees it."""
    return f"<!-- test: run\n{block.text}" in page


class Case(NamedTuple):
    """A program, and on how many ranks it runs; 0: it is no rank."""

    code: str
    ranks: int = 0


def of_pages() -> dict[str, Case]:
    """Each block of Python of each page."""
    found = {}
    for page, blocks in pages.BLOCKS.items():
        asked = re.search(r"^<!-- test: ranks (\d+) -->", page.read_text(), re.MULTILINE)
        run = [block for block in blocks if block.is_run]
        for block in (block for block in run if not hidden(block, page.read_text())):
            code = pasted(run, block, page.read_text())
            ranks = 2 if "init_process_group" in code else 0
            found[f"block {block.place}"] = Case(code, int(asked[1]) if asked and ranks else ranks)
    return found


def of_commands() -> dict[str, Case]:
    """Each command with a real input, and each command line of the pages that runs a program of ours."""
    found = {f"fusedonebit {name}": Case(MAIN.format(shlex.split(line))) for name, line in COMMANDS.items()}
    for place, line in pages.COMMANDS:
        name, *words = shlex.split(line)
        if name == "python" and "argparse" in pages.source_of(words[1]):
            found[f"{line} ({place})"] = Case(f"import sys; sys.argv[1:] = {words[1:]!r}{pages.PARSE}")
        elif name == "fusedonebit" and words[0] == "train":
            if not {"--ddp", "--topology"} & {*words}:  # which take several processes: `make test-full`
                fast = [*pages.FAST, "--text", "my.txt", "--nproc", "1"]
                fast += ["--freeze-step", "6"] if "--freeze-step" in words else []
                found[f"{line} ({place})"] = Case(MAIN.format([*words, *fast]))
        elif name == "fusedonebit":
            found[f"{line} ({place})"] = Case(MAIN.format(words))
    return found


def of_names() -> dict[str, Case]:
    """Each public name, used; each documented one, imported; what users do with each optimizer."""
    found = {name: Case(f"{START}import fusedonebit\n{use}") for name, use in (NAMES | ASKED).items()}
    found |= {f"import {path}": Case(code) for path, code in documented().items()}
    for kind in OPTIMIZERS:
        made = getattr(fusedonebit, kind)
        calls = {call: code for call, code in CALLS.items() if hasattr(made, call) or call.startswith("__")}
        if kind == "AdamW":
            calls["no_sync"] = "with new(wire=fusedonebit.Wire(release_gradients=True)).no_sync(): pass"
        called = CALLED.format(kind=kind, calls=calls, given=GIVEN.get(kind, "model.parameters()"))
        found[f"what {kind} does"] = Case(f"{START}import fusedonebit\n{called}")
        if hasattr(made, "from_deepspeed"):
            code = f"train(fusedonebit.{kind}.from_deepspeed(model.parameters(), {{'lr': 1e-3}}), 3)"
            found[f"{kind}.from_deepspeed"] = Case(f"{START}import fusedonebit\n{code}")
    return found


CASES = of_names() | of_commands() | of_pages()
SAMPLE = [*random.Random(SEED).sample(sorted(CASES), SAMPLED), "OneBitAdam.from_deepspeed"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With what the pages, and the commands here, take for granted."""
    pages.put_at_hand(tmp_path)
    return tmp_path


@pytest.mark.long(but=SAMPLE)
@pytest.mark.parametrize("name", CASES)
def test_it_works_alone(name: str, torch_alone: Server, folder: Path):
    torch_alone.run(CASES[name].code, folder, CASES[name].ranks)


def new_interpreter(folder: Path, *arguments: str) -> None:
    program = [sys.executable, *arguments]
    ended = subprocess.run(program, cwd=folder, env=environment(), capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.long(but=["migrate"])
@pytest.mark.parametrize("name", ["train", "report", "plan", "migrate"])
def test_a_command_runs_in_a_new_interpreter(name: str, folder: Path):
    new_interpreter(folder, "-m", "fusedonebit", *shlex.split(COMMANDS[name]))


LIGHT = """
import sys, fusedonebit
slow = {"torch.distributed.checkpoint", "torch._dynamo", "triton", "matplotlib", "rich"} & set(sys.modules)
assert not slow, slow
assert {"dcp", "ddp", "amp", "deepspeed", "policies", "Recorder"} <= set(dir(fusedonebit))
try:
    fusedonebit.nothing
except AttributeError as error:
    assert str(error) == "module 'fusedonebit' has no attribute 'nothing'"
"""


@pytest.mark.long
def test_an_import_takes_nothing_slow_and_names_what_there_is(folder: Path):
    new_interpreter(folder, "-c", LIGHT)


def test_every_public_name_is_used():
    """What is exported, and what is made in the modules among it."""
    found = set(fusedonebit.__all__)
    for name in fusedonebit.__all__:
        module = getattr(fusedonebit, name)
        if inspect.ismodule(module):
            made = [value for value in vars(module).values() if inspect.isclass(value) or inspect.isfunction(value)]
            own = [value.__name__ for value in made if value.__module__ == module.__name__]
            found |= {f"{name}.{each}" for each in own if not each.startswith("_")}
    print(f"{len(found)} public names, {len(CASES)} programs: {len(of_commands())} commands, {len(of_pages())} blocks")
    assert found <= NAMES.keys()
    used = [name for name in NAMES if "." in name and name not in found]
    assert all(name.startswith(("checkpoint.", "apps.", "deepspeed.")) for name in used)
