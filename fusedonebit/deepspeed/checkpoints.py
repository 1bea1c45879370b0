"""Takes up checkpoints of DeepSpeed's 1-bit optimizers.

They hold, of each parameter (or of each group's flat buffer, where DeepSpeed trains in 16 bits): ``step``, which
counts the first call, that changes nothing; ``exp_avg``; ``exp_avg_sq``, without bias correction, as Adam keeps it;
1-bit LAMB's ``lamb_coeff_freeze`` and, once frozen, ``scaling_coeff``. Residuals are of one rank, and dropped by
DeepSpeed as well when it loads. In 16 bits there are float32 weights besides.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import FusedOneBitWarning
from .values import count, floats, mapping, number, sequence

KEY = "fusedonebit"
"""Under which the first of the ``param_groups`` in a ``state_dict()`` has what is no tensor, as JSON."""

GROUP_KEYS = {
    "lr": "lr",
    "betas": "betas",
    "eps": "eps",
    "weight_decay": "weight_decay",
    "max_coeff": "c_max",
    "min_coeff": "c_min",
}
"""DeepSpeed's names of what a parameter group has, and ours."""

LEAST = {"exp_avg": -math.inf, "exp_avg_sq": 0.0}
"""Entries of a state that are per element, and the least value of each."""

KINDS = {"lamb_coeff_freeze": "OneBitLamb", "var_interval": "ZeroOneAdam"}
"""By what only that optimizer keeps of a parameter."""

LOST = {
    "OneBitAdam": "the residuals of compression, which DeepSpeed itself drops when it loads",
    "OneBitLamb": "the residuals of compression, which DeepSpeed itself drops when it loads, and the variance rebuilt "
    "since the freeze, with its ratios: they begin again as at the freeze",
    "ZeroOneAdam": "the residuals of compression and the local steps since the last synchronisation, which DeepSpeed "
    "itself drops when it loads; intervals are what the policies say after so many steps",
}


@dataclass(frozen=True)
class Taken:
    """Tells what was taken up of a DeepSpeed checkpoint.

    Attributes:
        updates: Updates that the run had made.
        phase: Of the next step: ``"warmup"`` or ``"compression"``; of 0/1 Adam ``"rounds"``, as its policies say.
        lost: What DeepSpeed did not write, in words; empty if nothing.
        loss_scale: For ``GradScaler(init_scale=)``; None where there was none.
        schedule_steps: For ``last_epoch`` of what ``schedule`` makes; None likewise.
    """

    updates: int
    phase: str
    lost: str
    loss_scale: float | None
    schedule_steps: int | None

    def __str__(self) -> str:
        stage = {"compression": "in the compression stage", "rounds": "in rounds as its policies say"}
        lost = f"; lost: {self.lost}" if self.lost else "; nothing is lost"
        return f"DeepSpeed's run goes on after {self.updates} updates, {stage.get(self.phase, 'in the warm-up')}{lost}"


@dataclass(frozen=True)
class _Read:
    """A checkpoint's parts, per trainable parameter, by its number."""

    kind: str
    step: int
    states: Mapping[int, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    masters: Mapping[int, Tensor]


def load_deepspeed(
    optimizer: torch.optim.Optimizer, checkpoint: Mapping[str, Any] | str | Path, model: torch.nn.Module | None = None
) -> Taken:
    """Go on from a checkpoint of DeepSpeed's OneBitAdam, OneBitLamb or ZeroOneAdam; every rank calls it.

    A run that was behind its freeze goes on in the compression stage, with its variance and momentum, if this
    optimizer's ``freeze_step`` is not larger; else in the warm-up. Float32 weights go into the parameters, and into
    ``master_weights``. Construct a schedule before: the groups' learning rates become those of the checkpoint.

    Args:
        optimizer: Of the same kind and model, with the same parameter groups in the same order.
        checkpoint: The folder that DeepSpeed wrote (with its ``latest``, or of one tag), a ``*_model_states.pt`` in
            it, what that holds, or the ``state_dict()`` of DeepSpeed's optimizer. Files are read with
            ``weights_only=True``: code in them does not run.
        model: Takes up the file's weights and buffers; None: you load them, before.

    Raises:
        OSError, TypeError, ValueError: on every rank, if it can't be read, or is of another model or optimizer.
    """
    read: _Read | None = None
    taken: Taken | None = None
    before = None if model is None else copy.deepcopy(model.state_dict())

    def translate(*_: object) -> dict[str, Any]:
        nonlocal read, taken
        try:
            whole = checkpoint if isinstance(checkpoint, Mapping) else _from_disk(Path(checkpoint))
            read = _read(optimizer, whole)
            saved = _ours(optimizer, read, _freeze_step(optimizer, whole))
            taken = _taken(optimizer, read, whole)
            if model is not None:
                if "module" not in whole:
                    raise ValueError('model must be None for a checkpoint without "module": load its weights yourself')
                model.load_state_dict(mapping(whole["module"], "module"))
            return saved
        except Exception as error:
            raise _clear(error) from None

    # In a hook, because what one rank's raises is an error on all of them.
    hook = optimizer.register_load_state_dict_pre_hook(translate, prepend=True)
    try:
        optimizer.load_state_dict({})
    except Exception:
        if model is not None and before is not None:
            model.load_state_dict(before)
        raise
    finally:
        hook.remove()
    assert read is not None
    assert taken is not None
    _take_weights(optimizer, read)
    if taken.lost:
        warnings.warn(str(taken), FusedOneBitWarning, stacklevel=2)
    return taken


def _clear(error: Exception) -> Exception:
    """Return the error, or put it in words where it was raised by what no check has foreseen."""
    if isinstance(error, KeyError):
        return ValueError(f"the checkpoint lacks the key {error}")
    if isinstance(error, (OSError, TypeError, ValueError)):
        return error
    reason = (str(error).strip() or type(error).__name__).replace("\n", " ")
    return ValueError(f"the checkpoint can't be taken up: {reason}")


@torch.no_grad()
def _take_weights(optimizer: torch.optim.Optimizer, read: _Read) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, weights in read.masters.items():
        params[i].copy_(weights)


# ---------------------------------------------------------------- reading


def _from_disk(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        path = _file_of(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} must be a folder that DeepSpeed wrote, or a file of it")
    try:
        whole = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path} can't be read as plain tensors and values: {[*str(error).splitlines(), type(error).__name__][0]} "
            "If you trust it, give load_deepspeed what torch.load(path, map_location='cpu', weights_only=False) returns"
        ) from error
    if not isinstance(whole, Mapping):
        raise TypeError(f"{path} must hold a dict, got {type(whole).__name__}")
    return whole


def _file_of(folder: Path) -> Path:
    """Return the one file with the model's states."""
    latest = folder / "latest"
    if latest.is_file():
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
        if Path(tag).name != tag or tag == ".." or "\x00" in tag:
            raise ValueError(f"{latest} must hold the name of a folder beside it, got {tag[:60]!r}")
        folder = folder / tag
    files = sorted(folder.glob("mp_rank_*_model_states.pt"))
    if not files:
        raise FileNotFoundError(
            f"{folder} must be a folder that DeepSpeed wrote, but has no mp_rank_00_model_states.pt"
        )
    if len(files) > 1:
        raise ValueError(
            f"{folder} is of a model that was cut over {len(files)} ranks; give each of them its own file of these: "
            f"{files[0].name} to {files[-1].name}"
        )
    return files[0]


def _read(optimizer: torch.optim.Optimizer, whole: Mapping[str, Any]) -> _Read:
    params = (p for group in optimizer.param_groups for p in group["params"])
    if any(hasattr(p, "to_local") and p.to_local().numel() != p.numel() for p in params):
        raise ValueError(
            "load_deepspeed needs whole parameters, but they are sharded; load before fully_shard, then save"
        )
    if _wrapped(whole) is None:
        raise ValueError(
            "the checkpoint has no optimizer state in it: ZeRO and DeepSpeed's bf16 wrapper write it cut by rank, in "
            "*_optim_states.pt, which can't be taken up; load the weights, and warm up anew"
        )
    wrapped = mapping(_wrapped(whole), "optimizer")
    inner = wrapped.get("optimizer_state_dict", wrapped)
    if not isinstance(inner, Mapping) or not {"state", "param_groups"} <= set(inner):
        raise ValueError(
            "the checkpoint must be of DeepSpeed's engine or optimizer, but its keys are "
            + ", ".join(map(str, wrapped))
        )
    flat = wrapped.get("fp32_groups_flat")
    weights = wrapped.get("fp32_groups") if flat is None else [[w] for w in sequence(flat, "fp32_groups_flat")]
    states, masters = _by_parameter(optimizer, inner, weights, flat is not None)
    any_state = next((state for state in states.values() if "exp_avg" in state), None)
    if any_state is None:
        raise ValueError("the checkpoint is of a run before its first step, with no state; load the weights, and begin")
    kind = next((kind for key, kind in KINDS.items() if key in any_state), "OneBitAdam")
    _check_kind(optimizer, kind)
    step = max(count(state["step"], f"step of parameter {i}") for i, state in states.items() if state)
    return _Read(kind, step, states, inner["param_groups"], masters)


def _wrapped(whole: Mapping[str, Any]) -> Any:
    """Return the optimizer's part of what an engine writes, or the whole."""
    return whole["optimizer"] if "module" in whole else whole


def _check_kind(optimizer: torch.optim.Optimizer, kind: str) -> None:
    mine = type(optimizer).__name__.removeprefix("DeepSpeed")  # what from_config makes of 0/1 Adam
    if mine != kind and (mine, kind) != ("ZeroOneAdam", "OneBitAdam"):
        raise ValueError(f"the checkpoint is of DeepSpeed's {kind}, which {mine} can't go on from; construct a {kind}")


def _by_parameter(
    optimizer: torch.optim.Optimizer, inner: Mapping[str, Any], weights: Sequence[Any] | None, flat: bool
) -> tuple[dict[int, dict[str, Any]], dict[int, Tensor]]:
    """State, and float32 weights if there are any, by the number of the parameter; flat buffers are cut."""
    states: dict[int, dict[str, Any]] = {}
    masters: dict[int, Tensor] = {}
    own, theirs = optimizer.param_groups, sequence(inner["param_groups"], "param_groups")
    saved_states = mapping(inner["state"], "state")
    if weights is not None and len(sequence(weights, "fp32_groups")) != len(theirs):
        raise ValueError(f"the checkpoint has {len(theirs)} parameter groups, but {len(weights)} groups of weights")
    if len(own) != len(theirs):
        raise ValueError(f"the checkpoint has {len(theirs)} parameter groups, this optimizer {len(own)}; make as many")
    first = 0
    for place, (group, saved) in enumerate(zip(own, theirs, strict=True)):
        indices = [count(i, "params") for i in sequence(mapping(saved, "a group")["params"], "params")]
        numbered = list(enumerate(group["params"], start=first))
        first += len(numbered)
        trained = [(i, p) for i, p in numbered if p.requires_grad]
        fitting = trained if flat or len(indices) == len(trained) else numbered
        if len(indices) != (1 if flat else len(fitting)):
            raise ValueError(
                f"the checkpoint's group {place} has {len(indices)} parameters, this optimizer's "
                f"{len(numbered)}; give it the same model and the same groups"
            )
        for at, index in enumerate(indices):
            parts = fitting if flat else [fitting[at]]
            what = f"group {place}" if flat else f"parameter {parts[0][0]}"
            states |= _cut_state(mapping(saved_states.get(index, {}), f"the state of {what}"), parts, what)
            if weights is not None:
                group_weights = sequence(weights[place], f"the weights of group {place}")
                if len(group_weights) != len(indices):
                    raise ValueError(f"the checkpoint's group {place} has weights of {len(group_weights)} parameters")
                pieces = _cut(group_weights[at], parts, f"weights of {what}")
                masters |= {i: piece for (i, _), piece in zip(parts, pieces, strict=True)}
    return states, masters


def _cut_state(state: Mapping[str, Any], parts: Sequence[tuple[int, Tensor]], what: str) -> dict[int, dict[str, Any]]:
    """Do the same for a state, of which only the moments are per element."""
    cut: dict[int, dict[str, Any]] = {i: {} for i, _ in parts} if state else {}
    for key, value in state.items():
        moment = key in LEAST
        pieces = _cut(value, parts, f"{key} of {what}", LEAST[key]) if moment else [value] * len(parts)
        for (i, _), piece in zip(parts, pieces, strict=True):
            cut[i][key] = piece
    return cut


def _cut(value: Any, parts: Sequence[tuple[int, Tensor]], what: str, least: float = -math.inf) -> list[Tensor]:
    """Return a flat buffer, or one tensor, in the shapes of parameters."""
    sizes = [p.numel() for _, p in parts]
    value = floats(value, what, least=least)
    if value.numel() != sum(sizes):
        raise ValueError(
            f"checkpoint of another model: {what} has {value.numel()} elements, these parameters {sum(sizes)}"
        )
    if value.dim() > 1 and value.shape != parts[0][1].shape:
        here = tuple(parts[0][1].shape)
        raise ValueError(f"checkpoint of another model: {what} has shape {tuple(value.shape)}, this parameter {here}")
    pieces = value.reshape(-1).split(sizes)
    return [piece.view(p.shape) for piece, (_, p) in zip(pieces, parts, strict=True)]


def _freeze_step(optimizer: Any, whole: Mapping[str, Any]) -> int | None:
    """After how many updates its variance was frozen; None: not by number."""
    config = whole.get("ds_config")
    block = config.get("optimizer") if isinstance(config, Mapping) else None
    params = block.get("params") if isinstance(block, Mapping) else None
    given = params.get("freeze_step") if isinstance(params, Mapping) else None
    if given is not None:
        return max(0, count(given, "freeze_step of ds_config") - 1)
    mine = getattr(optimizer.frame.options, "freeze_step", None)
    return mine if isinstance(mine, int) else None


# ---------------------------------------------------------------- writing ours


def _ours(optimizer: torch.optim.Optimizer, read: _Read, frozen: int | None) -> dict[str, Any]:
    """Take up a warm-up's checkpoint; once ``freeze_step`` is reached the next step begins with the freeze."""
    updates = max(read.step - 1, 0)
    header: dict[str, Any] = {"algorithm": type(optimizer).__name__, "phase": "warmup"}
    header |= {"updates": updates, "skipped": 0}
    header["variance_step"] = float(updates if frozen is None else min(updates, frozen))
    if read.kind == "OneBitLamb":
        header["unit_is_known"] = all("scaling_coeff" in state for state in read.states.values())
    groups: list[dict[str, Any]] = []
    first = 0
    for own, theirs in zip(optimizer.param_groups, read.groups, strict=True):
        group = {ours: theirs[key] for key, ours in GROUP_KEYS.items() if key in theirs and ours in own}
        groups.append(group | {"params": list(range(first, first + len(own["params"])))})
        first += len(own["params"])
    groups[0][KEY] = json.dumps(header)
    states = {}
    for i, state in read.states.items():
        if "exp_avg" in state:
            states[i] = {"step": torch.tensor(float(updates)), **{k: state[k] for k in ("exp_avg", "exp_avg_sq")}}
            states[i] |= _of_lamb(state) if read.kind == "OneBitLamb" else {}
            states[i] |= {"master": read.masters[i]} if i in read.masters else {}
    return {"state": states, "param_groups": groups}


def _of_lamb(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Take up c_avg, and once frozen the scale of the momentum."""
    average = number(state["lamb_coeff_freeze"], "lamb_coeff_freeze")
    kept = {"layer": torch.tensor([average, 1.0, average])}
    if "scaling_coeff" in state:
        kept["unit"] = torch.tensor(number(state["scaling_coeff"], "scaling_coeff"))
    return kept


def _taken(optimizer: Any, read: _Read, whole: Mapping[str, Any]) -> Taken:
    updates = max(read.step - 1, 0)
    freeze = getattr(optimizer.frame.options, "freeze_step", None)
    compressed = isinstance(freeze, int) and updates >= freeze
    scale = _wrapped(whole).get("cur_scale")
    scale = None if scale is None else number(scale, "cur_scale")
    position = mapping(whole.get("lr_scheduler") or {}, "lr_scheduler").get("last_batch_iteration")
    if position not in (None, -1):  # before its first step
        position = count(position, "last_batch_iteration")
    return Taken(
        updates=updates,
        phase="rounds" if read.kind == "ZeroOneAdam" else "compression" if compressed else "warmup",
        lost=LOST[read.kind] if compressed or read.kind == "ZeroOneAdam" else "",
        loss_scale=None if scale is None or scale == 1 else scale,
        schedule_steps=None if position is None else position + 1,
    )
