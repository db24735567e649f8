"""The user's DeepSpeed JSON config: reading it, and refusing entries that phalanx decides.

Refused are entries that phalanx decides (batch sizes, accumulation, clipping, precision, optimizer, scheduler), the
value ``"auto"``, which only Hugging Face's integration fills in, and misspelled top-level names, which DeepSpeed would
ignore. One message names all of them, each with its replacement. Every other entry goes to DeepSpeed unchanged.
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
_ACCUMULATION = "Trainer(accumulate_grad_batches=...) or Fabric(accumulate=...)"
_PRECISION = "Trainer(precision=...) or Fabric(precision=...)"

OWNED: dict[str, str] = {
    "train_batch_size": _BATCHES,
    "train_micro_batch_size_per_gpu": _BATCHES,
    "gradient_accumulation_steps": _ACCUMULATION,
    "managed_gradient_accumulation": _ACCUMULATION,
    "gradient_clipping": "Trainer(gradient_clip_val=...) or Fabric.clip_gradients",
    "gradient_allreduce_op": "TrainModule.batch_weight: gradients are weighted means over ranks",
    "zero_optimization.compute_grad_norm": "nothing: the norm is always available",
    **dict.fromkeys(
        ("bf16", "bfloat16", "fp16", "amp", "torch_autocast", "data_types.param_dtype", "data_types.buffer_dtype"),
        _PRECISION,
    ),
    "optimizer": "TrainModule.configure_optimizers: torch.optim.Adam(W) becomes DeepSpeed's own form",
    "scheduler": "TrainModule.configure_optimizers, with any torch scheduler",
    "dataloader_drop_last": "DataLoader(drop_last=...)",
    "checkpoint": "Trainer's checkpoints: one format for all strategies",
    "zero_optimization.cpu_offload": "DeepSpeedStrategy(offload_optimizer='cpu')",
    "zero_optimization.cpu_offload_param": "DeepSpeedStrategy(stage=3, offload_parameters='cpu')",
    "zero_optimization.cpu_offload_use_pin_memory": "DeepSpeedStrategy(pin_memory=...)",
    "sequence_parallel_size": "Trainer(parallel={'cp': ...}), with strategy='ddp' or 'fsdp'",
    "tensor_parallel": "strategy FSDPStrategy(tensor_parallel=...)",
    "pipeline": "Trainer(parallel={'pp': ...}), with strategy='pipeline'",
}
"""Dotted keys that phalanx decides, and what to use instead."""

# The other names that DeepSpeed 0.19.8 reads at the top level. It ignores all others without a warning.
_TOP_LEVEL = (
    "activation_checkpointing", "aio", "autotuning", "comet", "comms_logger", "communication_data_type", "compile",
    "csv_monitor", "data_efficiency", "data_types", "datastates_ckpt", "disable_allgather", "disable_python_gc",
    "dump_state", "expert_parallel", "flops_profiler", "gradient_predivide_factor", "hybrid_engine", "log_level",
    "memory_breakdown", "prescale_gradients", "seq_parallel_communication_data_type", "steps_per_print", "tensorboard",
    "timers", "use_data_before_expert_parallelism", "vocabulary_size", "wall_clock_breakdown", "wandb",
    "weight_quantization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
)  # fmt: skip

# Blocks that arguments are written into, or whose entries phalanx reads.
_BLOCKS = (
    "aio",
    "data_types",
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
)

# DeepSpeed itself defines "auto" in these.
_OWN_AUTO = ("zero_optimization.zenflow.", "data_types.keep_in_fp32_modules", "expert_parallel.")


def read_config(given: Any) -> tuple[dict[str, Any], str]:
    """Return a copy of the user's config, and how messages call it.

    Args:
        given: None, a dict, or the path of a JSON file.

    Raises:
        ConfigurationError: the file cannot be read, is not valid JSON, or does not hold an object.
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
            f"config={str(given)!r} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno} "
            "(JSON has no comments and no comma before a closing bracket)."
        ) from None
    except ValueError as error:  # not UTF-8, or a duplicate key
        raise ConfigurationError(f"config={str(given)!r} is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"config={str(given)!r} must hold a JSON object, not {type(found).__name__}.")
    return found, f"config {str(given)!r}"


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Python's parser would let the last of two equal keys win without a warning."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return found


def check_config(config: Mapping[str, Any], called: str, contradictions: list[str]) -> None:
    """Refuse a config with entries that must not be there.

    Args:
        called: how the message calls the config.
        contradictions: phrases about entries that an argument contradicts, for the same message.

    Raises:
        ConfigurationError: naming all offending entries at once.
    """
    found = [*_offences(config), *contradictions]
    if found:
        count = f"{len(found)} entries" if len(found) > 1 else "an entry"
        raise ConfigurationError(f"DeepSpeed {called} has {count} to change. " + "; ".join(found) + ".")


def _offences(block: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a phrase for every entry that must not be there; a refused block is not searched further."""
    for key, value in block.items():
        name = f"{prefix}{key}"
        phrase = _offence(name, value)
        if phrase is not None:
            yield f"{name}: {phrase}"
        elif isinstance(value, Mapping):
            yield from _offences(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            yield from _offences({f"{key}[{index}]": item for index, item in enumerate(value)}, prefix)


def _offence(name: str, value: Any) -> str | None:
    if name in OWNED:
        return f"decided by phalanx; use {OWNED[name]}"
    if name in _BLOCKS and value is not None and not isinstance(value, Mapping):
        return f"{value!r} must be an object {{...}}"
    if value == "auto" and not name.startswith(_OWN_AUTO):
        return "'auto' is supported by Hugging Face's integration alone; leave it out, or give a value"
    if "." not in name and "[" not in name and name not in _TOP_LEVEL:
        # An unrelated name is let through, as DeepSpeed does: users keep notes there. A near miss is a typo.
        guess = did_you_mean(name, [*_TOP_LEVEL, *OWNED])
        return f"not a key of DeepSpeed.{guess.rstrip('?')}" if guess else None
    return None
