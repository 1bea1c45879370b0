"""Why keys of a DeepSpeed config are not carried over: one reason for a key, or for a whole block."""

from __future__ import annotations

from .deepspeed_config import Config

_BATCHES = "a matter of your DataLoader"
_LOG = "what DeepSpeed's engine prints; here optimizer.stats() says it when you ask"
_PROFILE = "DeepSpeed's own profiler; use torch.profiler"
_MONITOR = "the engine's logging; log optimizer.stats() yourself"
_DATA = "the engine's data pipeline, not the optimizer"
_SPARE = "DeepSpeed's offloading to CPU or disk; optimizer state stays on the parameters' device here"
_PARALLEL = (
    "the engine cuts the model; cut it yourself, give the optimizer the data-parallel group, process_group=, and the "
    "ranks with the other parts, Wire(model_parallel=), or each part is clipped by its own norm and replicas part"
)
_MODEL = "the engine changes the model, not the optimizer; change it yourself before the optimizer is constructed"
_CHECKPOINT = "how DeepSpeed writes files; here fusedonebit.dcp.save and .load, or torch.save of state_dict()"
_AVERAGE = "gradients are averaged in float32 here, which needs no scaling beforehand"

REASONS = {
    # batches
    "train_batch_size": "follows from the DataLoader's batch size, accumulation steps and ranks",
    "managed_gradient_accumulation": "your loop counts micro-batches itself; step() is called at the end",
    "dataloader_drop_last": f"{_BATCHES}: drop_last=",
    "data_efficiency": _DATA,
    "curriculum_learning": _DATA,
    "vocabulary_size": "only for a warning of DeepSpeed's",
    # gradients
    "communication_data_type": "warm-up gradients travel as float32, then momentum as bits; there is nothing to choose",
    "seq_parallel_communication_data_type": _PARALLEL,
    "fp32_allreduce": "warm-up gradients always travel as float32",
    "prescale_gradients": _AVERAGE,
    "gradient_predivide_factor": _AVERAGE,
    "sparse_gradients": "sparse gradients have no counterpart: construct nn.Embedding with sparse=False",
    "disable_allgather": "about ZeRO's collectives; there are none here",
    "graph_harvesting": "about the engine's CUDA graphs; here capturable=True (docs/loops.md, CUDA graphs)",
    # ZeRO and other ways to cut a model
    "zero_allow_untested_optimizer": "there is no ZeRO here, so nothing to allow",
    "zero_force_ds_cpu_optimizer": "there is no ZeRO here, so nothing to force",
    "aio": _SPARE,
    "tensor_parallel": _PARALLEL,
    "expert_parallel": _PARALLEL,
    "sequence_parallel_size": _PARALLEL,
    "use_data_before_expert_parallelism": _PARALLEL,
    "pipeline": "pipeline stages are the engine's; give each stage's optimizer its data-parallel group, process_group="
    ", and the other stages, Wire(model_parallel=), or each stage is clipped by its own norm",
    "hybrid_engine": "DeepSpeed's engine for RLHF; there is no engine here",
    # the model
    "activation_checkpointing": "a matter of the model: torch.utils.checkpoint",
    "sparse_attention": _MODEL,
    "compression_training": _MODEL,
    "quantize_training": _MODEL,
    "weight_quantization": _MODEL,
    "progressive_layer_drop": _MODEL,
    "eigenvalue": _MODEL,
    "compile": "the engine's use of torch.compile; here torch.compile(model), and torch.compile(optimizer.step)",
    # logging, profiling, launching
    "steps_per_print": _LOG,
    "wall_clock_breakdown": _LOG,
    "memory_breakdown": _LOG,
    "dump_state": _LOG,
    "log_level": _LOG,
    "timers": _LOG,
    "comms_logger": "the engine's log of messages; here optimizer.stats()['bytes_step'] and ['bytes_total']",
    "flops_profiler": _PROFILE,
    "autotuning": "DeepSpeed's search for settings of its engine",
    "tensorboard": _MONITOR,
    "wandb": _MONITOR,
    "comet": _MONITOR,
    "csv_monitor": _MONITOR,
    "elasticity": "DeepSpeed's choice of batch sizes and restarts; torchrun restarts, examples/elastic.py goes on",
    "nebula": _CHECKPOINT,
    "datastates_ckpt": _CHECKPOINT,
    "checkpoint": _CHECKPOINT,
}
"""By top-level key. A block counts as a whole."""

HYSTERESIS = "GradScaler halves the scale at every overflow, at once"
DETAILS = {
    "fp16.hysteresis": HYSTERESIS,
    "fp16.consecutive_hysteresis": HYSTERESIS,
    "fp16.min_loss_scale": "GradScaler has no least scale; look at scaler.get_scale()",
    "fp16.auto_cast": "autocast takes inputs of any type; with model.half(), cast your inputs",
    "fp16.fp16_master_weights_and_grads": "about ZeRO-Offload; masters are float32 here",
    "bf16.bf16_master_weights_and_grads": "masters are float32 here; without any: stochastic_rounding=True",
    "bf16.bf16_optimizer_states": "state is float32 here; frozen_dtype=torch.bfloat16 halves the frozen variance",
    "torch_autocast.lower_precision_safe_modules": "about the type of messages, which are float32 or bits here",
}
for _block in ("bf16", "bfloat16"):
    DETAILS[f"{_block}.immediate_grad_update"] = "gradients accumulate in p.grad"
    DETAILS[f"{_block}.check_grad_overflow"] = "every step looks for NaN and Inf here: nonfinite="
"""Of mixed precision."""

SHARDING = (
    "state is not sharded over the ranks that exchange bits; sharded inside a node goes with "
    'fully_shard(module, mesh=mesh["shard"]) and process_group=mesh["replicate"] (examples/hsdp.py)'
)


def explain(config: Config) -> None:
    """Say why, for every key of the tables that the config has."""
    for key, reason in REASONS.items():
        config.explained(key, reason)
    _explain_sum(config)
    _explain_zero(config)
    _explain_data_types(config)


def _explain_sum(config: Config) -> None:
    operation = config.get("gradient_allreduce_op", "mean")
    texts = {
        "sum": "gradients are averaged: multiply the loss by the number of ranks",
        "mean": "nothing to do: gradients are averaged here",
    }
    if not isinstance(operation, str) or operation not in texts:
        raise config.error("gradient_allreduce_op", '"mean" or "sum"', operation)
    config.explained("gradient_allreduce_op", texts[operation])


def _explain_zero(config: Config) -> None:
    if isinstance(config.get("zero_optimization"), bool):
        config.explained("zero_optimization", SHARDING)  # of DeepSpeed's first versions
        return
    config.block("zero_optimization")
    stage = config.number("zero_optimization.stage", 0, 3, int)
    nothing = "nothing to do: stage 0 shards nothing, which is how it is here"
    config.explained("zero_optimization.stage", SHARDING if stage else nothing)
    for key in config.block("zero_optimization"):
        if "offload" in key:
            config.explained(f"zero_optimization.{key}", _SPARE)
    config.explained("zero_optimization", "about ZeRO's shards and their messages; there are none here")


def _explain_data_types(config: Config) -> None:
    config.block("data_types")
    config.explained(
        "data_types.grad_accum_dtype",
        "gradients accumulate in p.grad, in the parameter's own type; autocast keeps parameters and gradients float32",
    )
    for key in ("param_dtype", "buffer_dtype"):
        config.explained(f"data_types.{key}", "construct the model in that type, or model.to() it")
