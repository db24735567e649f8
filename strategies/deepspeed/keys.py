"""The user's DeepSpeed JSON: read, and checked before any process starts.

What phalanx itself decides (batch sizes, accumulation, clipping, precision, optimizer, scheduler) is refused, and so is
the value ``"auto"``, which only Hugging Face's integration fills in: all offenders in one message, each with what to
use instead. Everything else goes to DeepSpeed as it is.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...framework.core.errors import ConfigurationError, did_you_mean

_BATCHES = "the DataLoader's batch_size"
_PRECISION = "Trainer(precision=...) or Fabric(precision=...)"
_ARGUMENT = "DeepSpeedStrategy(offload_optimizer='cpu')"
_ONE_MODEL = "nothing: every rank trains on data of its own"

OWNED: dict[str, str] = {
    "train_batch_size": _BATCHES,
    "train_micro_batch_size_per_gpu": _BATCHES,
    "gradient_accumulation_steps": "Trainer(accumulate_grad_batches=...) or Fabric(accumulate=...)",
    "managed_gradient_accumulation": "Trainer(accumulate_grad_batches=...) or Fabric(accumulate=...)",
    "gradient_clipping": "Trainer(gradient_clip_val=...) or Fabric.clip_gradients",
    "gradient_allreduce_op": "TrainModule.batch_weight: gradients are weighted means over ranks",
    "zero_optimization.compute_grad_norm": "nothing: the norm is always at hand",
    "bf16": _PRECISION,
    "bfloat16": _PRECISION,
    "fp16": _PRECISION,
    "amp": _PRECISION,
    "torch_autocast": _PRECISION,
    "data_types.param_dtype": _PRECISION,
    "data_types.buffer_dtype": _PRECISION,
    "optimizer": "TrainModule.configure_optimizers: torch.optim.Adam(W) becomes DeepSpeed's own form",
    "scheduler": "TrainModule.configure_optimizers, with any torch scheduler",
    "dataloader_drop_last": "DataLoader(drop_last=...)",
    "checkpoint": "Trainer's checkpoints: one format for all strategies",
    "zero_optimization.cpu_offload": _ARGUMENT,
    "zero_optimization.cpu_offload_param": "DeepSpeedStrategy(stage=3, offload_parameters='cpu')",
    "zero_optimization.cpu_offload_use_pin_memory": "DeepSpeedStrategy(pin_memory=...)",
    "sequence_parallel_size": _ONE_MODEL,
    "tensor_parallel": "strategy FSDPStrategy(tensor_parallel=...)",
    "pipeline": _ONE_MODEL,
}
"""Keys that phalanx decides, dotted, and what to use instead."""

_REMOVED = (
    "nebula",
    "compression_training",
    "quantize_training",
    "sparse_gradients",
    "eigenvalue",
    "sparse_attention",
    "elasticity",
    "graph_harvesting",
    "curriculum_learning",
    "progressive_layer_drop",
    "zero_optimization.mics_shard_size",
    "zero_optimization.mics_hierarchical_params_gather",
    "zero_optimization.zeropp_loco_param",
)

# DeepSpeed reads these itself; any other name at the top it ignores without a word.
_TOP_LEVEL = (
    "activation_checkpointing",
    "aio",
    "autotuning",
    "comms_logger",
    "communication_data_type",
    "compile",
    "csv_monitor",
    "comet",
    "data_efficiency",
    "data_types",
    "datastates_ckpt",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "expert_parallel",
    "flops_profiler",
    "gradient_predivide_factor",
    "hybrid_engine",
    "log_level",
    "memory_breakdown",
    "prescale_gradients",
    "seq_parallel_communication_data_type",
    "steps_per_print",
    "tensorboard",
    "timers",
    "use_data_before_expert_parallelism",
    "vocabulary_size",
    "wall_clock_breakdown",
    "wandb",
    "weight_quantization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
)

_BLOCKS = (
    "aio",
    "data_types",
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
)

# Where DeepSpeed itself gives "auto" a meaning.
_OWN_AUTO = ("zero_optimization.zenflow.", "data_types.keep_in_fp32_modules", "expert_parallel.")


def read_config(given: Any) -> tuple[dict[str, Any], str]:
    """Return a user's config, a dict or the path of a JSON file, as a dict of its own, and what to call it.

    Raises:
        ConfigurationError: the file cannot be read, is no JSON, or holds no object.
    """
    if given is None:
        return {}, "config"
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given)), "config"
    if not isinstance(given, (str, os.PathLike)):
        raise ConfigurationError(f"config={given!r} must be a dict or the path of a JSON file.")
    path = Path(given).expanduser()
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise ConfigurationError(f"config={str(given)!r} cannot be read: {error.strerror}. Check the path.") from None
    except json.JSONDecodeError as error:
        raise ConfigurationError(
            f"config={str(given)!r} is no valid JSON: {error.msg} at line {error.lineno}, column {error.colno} "
            "(JSON has no comments and no comma before a closing bracket)."
        ) from None
    except (UnicodeDecodeError, _DuplicateKey) as error:
        raise ConfigurationError(f"config={str(given)!r} is no valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"config={str(given)!r} must hold a JSON object, not {type(found).__name__}.")
    return found, f"config {str(given)!r}"


class _DuplicateKey(ValueError):
    """A key stands twice in one JSON object."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DuplicateKey(f"the key {key!r} stands twice in one object")
        found[key] = value
    return found


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of a nested config, dotted, and its value; blocks come before what they hold."""
    for key, value in config.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                yield from flat({f"{key}[{index}]": item}, prefix)


def offences(config: Mapping[str, Any]) -> list[str]:
    """Return a phrase for everything in a user's config that cannot stay."""
    found: list[str] = []
    refused: list[str] = []
    for name, value in flat(config):
        if any(name.startswith(f"{each}.") for each in refused):
            continue
        phrase = _offence(name, value)
        if phrase is not None:
            refused.append(name)
            found.append(f"{name}: {phrase}")
    return found


def _offence(name: str, value: Any) -> str | None:
    if name in OWNED:
        return f"decided by phalanx; use {OWNED[name]}"
    if name in _REMOVED:
        return "no longer in DeepSpeed; leave it out"
    if name in _BLOCKS and value is not None and not isinstance(value, Mapping):
        return f"{value!r} must be an object {{...}}"
    if value == "auto" and not name.startswith(_OWN_AUTO):
        return "'auto' is filled in by Hugging Face's integration alone; leave it out, or give a value"
    if "." not in name and "[" not in name and name not in _TOP_LEVEL:
        # A name of another's making passes through, as DeepSpeed lets it; one meant to be DeepSpeed's does not.
        guess = did_you_mean(name, [*_TOP_LEVEL, *OWNED])
        return f"not a key of DeepSpeed.{guess.rstrip('?')}" if guess else None
    return None


def check_config(config: Mapping[str, Any], called: str, others: list[str]) -> None:
    """Refuse a config that holds what it must not; ``others`` are phrases of contradictions found elsewhere.

    Raises:
        ConfigurationError: naming all offenders at once.
    """
    found = [*offences(config), *others]
    if found:
        count = f"{len(found)} entries" if len(found) > 1 else "an entry"
        raise ConfigurationError(f"DeepSpeed {called} has {count} to change. " + "; ".join(found) + ".")
