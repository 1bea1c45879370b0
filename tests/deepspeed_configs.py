"""DeepSpeed's configs and schedules, as its documentation has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data" / "deepspeed_configs"
CONFIGS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
SCHEDULES = json.loads((FOLDER.parent / "deepspeed_schedules.json").read_text())
ADAM = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 9}}

VALID: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "MultiStepLR": {"milestones": [2, 3], "gamma": 0.5},
    "ConstantLR": {"factor": 0.5, "total_iters": 2},
    "LinearLR": {"start_factor": 0.5, "end_factor": 1.0, "total_iters": 2},
    "ExponentialLR": {"gamma": 0.5},
    "PolynomialLR": {"total_iters": 4, "power": 2},
    "CosineAnnealingLR": {"T_max": 4, "eta_min": 1e-4},
    "CosineAnnealingWarmRestarts": {"T_0": 2, "T_mult": 2},
    "CyclicLR": {"base_lr": 1e-4, "max_lr": 1e-3, "step_size_up": 2, "mode": "triangular2", "cycle_momentum": False},
    "OneCycleLR": {"max_lr": 1e-2, "total_steps": 9, "anneal_strategy": "linear", "cycle_momentum": False},
    "WarmupLR": {"warmup_num_steps": 0, "warmup_max_lr": 1e-3},
    "WarmupDecayLR": {"total_num_steps": 9, "warmup_num_steps": 1, "warmup_type": "linear"},
    "WarmupCosineLR": {"total_num_steps": 9, "warmup_num_steps": 3},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "last_batch_iteration": -1},
    "LRRangeTest": {"lr_range_test_staircase": True, "lr_range_test_step_size": 1},
}
