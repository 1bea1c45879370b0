"""However it comes to a machine, the whole package can be imported: from a clone, a wheel, an sdist, an editable one.

Nothing is downloaded: torch is the one that runs the tests, and pip works without an index.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from setuptools.config.pyprojecttoml import read_configuration

import fusedonebit

ROOT = Path(__file__).parent.parent
LEFT_BEHIND = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "runs", "*.egg-info", ".*_cache", ".hypothesis", "__pycache__", "peers"
)
ALL = """
import fusedonebit.comm.mpi, fusedonebit.triton_kernels.native
from fusedonebit.apps import cli
import fusedonebit.deepspeed.migrate.translate, fusedonebit.apps.train.run
import fusedonebit.apps.plan.costs, fusedonebit.apps.report.page
from fusedonebit.triton_kernels import native
assert native.KERNELS
print(fusedonebit.__file__)
"""
PIP = ("--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What ``git clone`` leaves."""
    return Path(shutil.copytree(ROOT, tmp_path / "clone", symlinks=True, ignore=LEFT_BEHIND))


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of an environment of its own, which has what these tests have, but for this package."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True, with_pip=False)
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv" if "venv" in sysconfig.get_scheme_names() else None, paths))
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def run(*command: object, cwd: Path, seconds: float = 200) -> str:
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=seconds,
        env=alone | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def pip(python: Path, *arguments: object, cwd: Path) -> None:
    run(sys.executable, "-m", "pip", "--python", python, *arguments, *PIP, cwd=cwd)


def imported(python: Path, cwd: Path) -> Path:
    """Where the package is found from a folder, when all of it is imported."""
    return Path(run(python, "-c", ALL, cwd=cwd).strip()).parent


def test_the_version_is_said_once_and_is_one_that_can_be_tagged():
    packaged = read_configuration(ROOT / "pyproject.toml")["project"]["version"]
    assert packaged == fusedonebit.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", packaged)


@pytest.mark.full
@pytest.mark.parametrize("how", ["pip install .", "pip install -e .", "wheel", "sdist"])
def test_every_way_to_install_it_brings_all_of_it(how: str, clone: Path, python: Path, tmp_path: Path):
    elsewhere, dist = tmp_path / "elsewhere", tmp_path / "dist"
    elsewhere.mkdir()
    if how.startswith("pip"):
        pip(python, *how.split()[1:], cwd=clone)
    else:
        what = clone
        if how == "sdist":
            make = "import setuptools.build_meta as backend, sys; print(backend.build_sdist(sys.argv[1]))"
            what = dist / run(sys.executable, "-c", make, dist, cwd=clone).split()[-1]
        pip(python, "wheel", what, "--wheel-dir", dist, cwd=elsewhere)
        (wheel,) = dist.glob("*.whl")
        assert wheel.name.startswith(f"fusedonebit-{fusedonebit.__version__}-")
        pip(python, "install", wheel, cwd=elsewhere)
        shutil.rmtree(clone)
    site = imported(python, elsewhere)
    assert site == clone / "fusedonebit" if "-e" in how else site.is_relative_to(tmp_path / "environment")
    assert run(python.parent / "fusedonebit", "--version", cwd=elsewhere) == f"fusedonebit {fusedonebit.__version__}\n"
    for file in ("apps/report/page.html", "triton_kernels/native/block_io.h", "py.typed"):
        assert (site / file).is_file(), file
    if clone.exists():  # where the reader is after `git clone ...; cd fusedonebit; pip install .`
        assert imported(python, clone) == clone / "fusedonebit"
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fusedonebit", "train")
        small = ("--model", "tiny", "--batch-size", "2", "--seq-len", "16", "--steps", "4", "--freeze-step", "2")
        assert "onebit-adam" in run(python, *launch, *small, "--out", tmp_path / "out", cwd=clone)
