"""The config that DeepSpeed's engine gets, made of what the user asked for and of the model's size.

Where a number comes from, the first that speaks: what phalanx decides (batch sizes, accumulation, clipping, precision);
what the user gave, as an argument or in the JSON (both, with two values, is refused); phalanx's own choice, which fits
the model; DeepSpeed's default. DeepSpeed's defaults suit models of billions of parameters: buckets of 5e8 elements take
4 GB on a model of 4 MB.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch

from ...framework.core.errors import ConfigurationError
from ...framework.core.loss_scaler import LossScaler
from ...framework.core.precision import Precision
from .arguments import Offload
from .arguments import ZeroArguments as ZeroArguments
from .arguments import ZeroOptions as ZeroOptions
from .arguments import resolve_options as resolve_options

_ZERO = "zero_optimization"


def check_precision(precision: Precision, device_type: str) -> None:
    """Refuse a precision that DeepSpeed's engine does not have.

    Raises:
        ConfigurationError: fp64, fp16 on a CPU, or a loss scale in another dtype than fp16.
    """
    if precision.parameter_dtype == torch.float64:
        raise ConfigurationError(
            f"precision={precision.name!r} is not known to DeepSpeed: use '32-true', or strategy='fsdp'."
        )
    if precision.loss_scaler() is not None and precision.compute_dtype != torch.float16:
        raise ConfigurationError(
            f"precision={precision.name!r} scales losses in {precision.compute_dtype}, and DeepSpeed scales them in "
            "fp16 alone: leave the loss scaler out, or use strategy='fsdp'."
        )
    if device_type == "cpu" and torch.float16 in (precision.compute_dtype, precision.parameter_dtype):
        raise ConfigurationError(
            f"precision={precision.name!r} is refused by DeepSpeed on a CPU: use 'bf16-mixed', or strategy='fsdp'."
        )


def engine_config(
    options: ZeroOptions,
    precision: Precision | None,
    world_size: int,
    model_elements: int,
    largest_elements: int | None = None,
    swap_folder: Path | None = None,
) -> dict[str, Any]:
    """Return the config that ``deepspeed.initialize`` and ``zero.Init`` get.

    ``precision=None`` is for an engine that only holds fp32. ``model_elements`` counts the elements of all parameters,
    ``largest_elements`` those of the largest one (by default as many); ``swap_folder`` replaces ``nvme_path``, so
    that runs do not share files.
    """
    config = copy.deepcopy(options.config)
    # Micro-batches are counted by phalanx, which tells the engine where a window ends.
    config.update(train_batch_size=world_size, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    config["gradient_clipping"] = 0.0
    config.update(_precision_blocks(precision) if precision is not None else {})
    config.setdefault("communication_data_type", "fp32")
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    config.setdefault("steps_per_print", None)
    for name in (_ZERO, "data_types"):
        config[name] = config.get(name) or {}
    config["data_types"].setdefault("grad_accum_dtype", "fp32")
    zero = config[_ZERO]
    zero["stage"] = options.stage
    for key, size in _sizes(options, world_size, model_elements).items():
        if key.removeprefix("stage3_") not in zero:
            zero.setdefault(key, size)
    path = swap_folder or options.nvme_path
    largest = max(1, -(-(largest_elements or model_elements) // world_size))
    _offload_block(zero, "offload_optimizer", options.offload_optimizer, path, {})
    _offload_block(zero, "offload_param", options.offload_parameters, path, {"buffer_size": largest, "max_in_cpu": 0})
    return config


def _precision_blocks(precision: Precision) -> dict[str, Any]:
    if precision.compute_dtype == torch.bfloat16:
        return {"bf16": {"enabled": True}}
    if precision.compute_dtype == torch.float16:
        # The engine scales losses in fp16 whatever the precision says: halved at each overflow, doubled after a while.
        scaler = precision.loss_scaler() or LossScaler()
        power, window = round(math.log2(scaler.scale)), scaler.growth_interval
        return {"fp16": {"enabled": True, "initial_scale_power": power, "loss_scale_window": window, "hysteresis": 1}}
    return {}


def _sizes(options: ZeroOptions, world_size: int, model_elements: int) -> dict[str, int]:
    """Return buckets and thresholds, in elements, that fit a model: a few hundredths of what the state takes."""
    bucket = _even(_between(model_elements // 64, 2**18, 50_000_000, model_elements))
    if options.stage < 3:
        return {
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": _even(_between(model_elements, 2**18, 50_000_000, model_elements)),
        }
    live = _even(_between(model_elements // 8, 2**18, 1_000_000_000, model_elements))
    sizes = {
        "reduce_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket,
        "stage3_max_live_parameters": live,
        # By default a parameter that is used again within 1e9 elements stays gathered, which is all of most models.
        "stage3_max_reuse_distance": live,
        "stage3_param_persistence_threshold": min(100_000, model_elements // 1000),
        "stage3_model_persistence_threshold": model_elements // 64,
    }
    if options.uses_nvme:
        # What one rank swaps at a time, times four.
        sizes["sub_group_size"] = _between(model_elements // (16 * world_size), 2**18, 1_000_000_000, model_elements)
    return sizes


def _between(wanted: int, low: int, high: int, model_elements: int) -> int:
    return max(2, min(max(wanted, low), high, model_elements))


def _even(size: int) -> int:
    return size + size % 2


def _offload_block(
    zero: dict[str, Any], name: str, device: Offload | None, path: Path | None, sizes: dict[str, int]
) -> None:
    """Set the device of an offload block; ``sizes`` are those of the buffers to a disk."""
    if device is None:
        zero.pop(name, None)
        return
    block = zero[name] = zero.get(name) or {}
    block["device"] = device
    if device == "nvme":
        block["nvme_path"] = str(path)
        for key, size in sizes.items():
            block.setdefault(key, size)
