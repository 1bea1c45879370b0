"""One rank's training run: model, optimizer, schedule, metrics, checkpoints."""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ... import Recorder, ddp
from ...comm import Topology, torus_rows
from ..corpus import Corpus, load_text
from ..parsing import InputError, installed
from ..transformer import SIZES, ByteTransformer
from .display import Display
from .optimizers import AGREE_IN_ROUNDS, FREEZE, OPTIMIZERS, TORCHS, Job

HELD_OUT_BATCHES = 8
FINAL_LR = 0.1  # of the peak, at the end of the cosine
LAYER_RECORDS = 100  # of what is told of each layer, in a run


def train_all(job: Job, rank: int, world_size: int, device: torch.device) -> None:
    """Train each of the job's optimizers; rank 0 writes and shows what happens."""
    corpus = Corpus(load_text(job.text), job.seq_len)
    display = Display(job.steps, enabled=rank == 0, compares=len(job.optimizers) > 1)
    with display.bars:
        for name in job.optimizers:
            Run(job, name, corpus, display, rank, world_size, device).train()


class Run:
    """The training of one model with one optimizer."""

    def __init__(
        self, job: Job, name: str, corpus: Corpus, display: Display, rank: int, world_size: int, device: torch.device
    ) -> None:
        self.job, self.name, self.corpus, self.display = job, name, corpus, display
        self.rank, self.world_size, self.device = rank, world_size, device
        torch.manual_seed(job.seed)
        self.model = ByteTransformer(SIZES[job.model], job.seq_len).to(device)
        make, usual_lr = OPTIMIZERS[name]
        lr = job.lr or usual_lr
        self.job = dataclasses.replace(job, lr=lr, topology=self._topology())
        self.optimizer = make(self.model.named_parameters(), lr, self.job)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._lr_factor)
        self.bytes_before = 0
        self.first_step = self._resume() if job.resume else 0
        self.forward: torch.nn.Module = self._in_ddp() if job.ddp else self.model

    def _in_ddp(self) -> DistributedDataParallel:
        model = DistributedDataParallel(self.model)  # after the checkpoint: it broadcasts what it is given
        ddp.attach(model, self.optimizer)
        return model

    def _topology(self) -> Topology:
        if self.job.topology != "auto":
            return self.job.topology
        from ..plan import choose_topology

        return choose_topology(sum(p.numel() for p in self.model.parameters()), self.world_size)

    def _lr_factor(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / max(self.job.lr_warmup_steps, 1))
        return warmup * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * step / self.job.steps)))

    def train(self) -> None:
        """Run to the last step."""
        job = self.job
        self.display.start(self.name, self.first_step)
        began, tokens = time.perf_counter(), 0
        with self._recorder() as recorder:
            for step in range(self.first_step, job.steps):
                loss = self._step(step)
                tokens += self.world_size * job.batch_size * job.seq_len
                done = step + 1
                more: dict[str, Any] = {"tokens_per_s": round(tokens / (time.perf_counter() - began))}
                if done % job.eval_every == 0 or done == job.steps:
                    more["held_out_loss"] = self.held_out_loss()
                record = recorder.log(done, loss=loss, **more)
                assert record is not None  # every step is recorded
                self.display.update(record)
                if done % job.save_every == 0 or done == job.steps:
                    self._save(done)

    def _recorder(self) -> Recorder:
        job = dataclasses.asdict(self.job)
        own = ("optimizers", "out", "resume")  # what says nothing about the run itself
        settings = {key: value for key, value in job.items() if key not in own}
        layers_every = max(1, self.job.steps // LAYER_RECORDS)
        how: dict[str, Any] = {"every": 1, "layers_every": layers_every, "bytes_before": self.bytes_before}
        return Recorder(self.job.out, self.optimizer, name=self.name, settings=settings, **how)

    def _step(self, step: int) -> float:
        tokens = self.corpus.batch(self.job.batch_size, self.job.seed, step, self.rank).to(self.device)
        loss = self.forward(tokens)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return self._mean(loss.detach())

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean held-out loss in nats per byte; the ranks share the batches."""
        total = torch.zeros((), device=self.device)
        for index in range(self.rank, HELD_OUT_BATCHES, self.world_size):
            batch = self.corpus.held_out_batch(16, index, HELD_OUT_BATCHES)
            total += self.model(batch.to(self.device))
        return self._mean(total) * self.world_size / HELD_OUT_BATCHES

    def _mean(self, value: torch.Tensor) -> float:
        if self.world_size > 1:
            dist.all_reduce(value)
        return float(value) / self.world_size

    # ---------------------------------------------------------------- files

    @property
    def _checkpoints(self) -> Path:
        return Path(self.job.out) / "checkpoints" / self.name

    def _file(self, step: int) -> Path:
        return self._checkpoints / f"step-{step:08d}" / f"rank-{self.rank}-of-{self.world_size}.pt"

    def _save(self, step: int) -> None:
        path = self._file(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".tmp")
        sent = self.optimizer.stats()["bytes_total"] + self.bytes_before
        state = {"step": step, "bytes_total": sent, "model": self.model.state_dict()}
        state |= {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
        torch.save(state, partial)
        partial.replace(path)
        if self.world_size > 1:
            dist.barrier()
        if self.rank == 0:
            for old in sorted(self._checkpoints.glob("step-*"))[:-2]:
                shutil.rmtree(old)

    def _resume(self) -> int:
        step = latest_step(self.job, self.name, self.world_size)
        if self.rank == 0:  # a later one was cut short: what is left of it must not be completed by others' new files
            for later in self._checkpoints.glob("step-*"):
                if later.name > self._file(step).parent.name:
                    shutil.rmtree(later)
        if step == 0:
            return 0
        state = torch.load(self._file(step), map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        # The optimizer may or may not have taken its count along.
        self.bytes_before = state["bytes_total"] - self.optimizer.stats()["bytes_total"]
        return step


def latest_step(job: Job, name: str, world_size: int) -> int:
    """Return the last step of which every rank has a checkpoint; 0 if there is none."""
    folder = Path(job.out) / "checkpoints" / name
    for step in sorted(folder.glob("step-*"), reverse=True):
        if len(list(step.glob(f"rank-*-of-{world_size}.pt"))) == world_size:
            return int(step.name.removeprefix("step-"))
    return 0


def check(job: Job, world_size: int) -> None:
    """Raise InputError for what can't work, before any process is started."""
    if job.model not in SIZES:
        raise InputError(f"--model must be one of {', '.join(SIZES)}, got {job.model!r}")
    if job.topology == "auto" and not installed("apps/plan"):
        raise InputError("--topology auto needs fusedonebit plan, which is not installed")
    in_rounds = [name for name in job.optimizers if name in AGREE_IN_ROUNDS]
    if job.local_steps > 1 and in_rounds:
        for flag, steps in (("--steps", job.steps), ("--eval-every", job.eval_every), ("--save-every", job.save_every)):
            if steps % job.local_steps:
                raise InputError(f"{flag} must be a multiple of --local-steps {job.local_steps}, got {steps}")
    freezing = [name for name in job.optimizers if name in FREEZE]
    if freezing and job.freeze_step != "auto" and job.freeze_step >= job.steps:
        raise InputError(
            f"--freeze-step must be below --steps {job.steps}, or {', '.join(freezing)} would never compress, "
            f"got {job.freeze_step}"
        )
    if job.ddp and world_size == 1:
        raise InputError("--ddp needs several processes, got --nproc 1")
    if job.ddp and (torchs := sorted({*TORCHS} & {*job.optimizers})):
        raise InputError(
            f"--ddp is for optimizers that fusedonebit.ddp.attach() takes, got {torchs[0]}, which is torch's"
        )
    if "zero-one-adam" in job.optimizers and job.freeze_step == "auto":
        raise InputError("--freeze-step must be a number with zero-one-adam, got auto: its variance has a policy")
    others = sorted(set(in_rounds) - {"marsit"})
    if job.topology in ("owner", "auto") and others:
        raise InputError(f"--topology {job.topology} is marsit's alone, got it with {', '.join(others)}")
    if job.topology == "torus" and in_rounds:
        try:
            torus_rows(world_size, None)
        except ValueError as error:
            raise InputError(f"--topology: {error}") from error
    Corpus(load_text(job.text), job.seq_len)
    if job.resume and not any(latest_step(job, name, world_size) for name in job.optimizers):
        raise InputError(
            f"--resume found no checkpoint of {' or '.join(job.optimizers)} on {world_size} ranks in {job.out}; "
            "check --out, --nproc and --optimizer"
        )
    try:
        Path(job.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {job.out} can't be made: {error.strerror or error}") from error
