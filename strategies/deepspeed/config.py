"""The config that DeepSpeed's engine gets, made from the user's options and the size of the model.

Each entry has the first of these values that is defined:

1. what phalanx decides: batch sizes, accumulation, clipping, precision;
2. what the user gave, as an argument or in the JSON (two different values are refused);
3. phalanx's own default, which fits the model;
4. DeepSpeed's default, which suits models of billions of parameters: buckets of 5e8 elements take 4 GB on a model of
   4 MB.

DeepSpeed's own ``DeepSpeedConfig`` checks the result before any process starts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ...framework.core.errors import ConfigurationError, did_you_mean
from ...framework.core.precision import LossScaler, Precision
from ...framework.system.environment import library_environment
from .arguments import Offload, ZeroOptions

# Any size is suitable for checking the types and ranges of settings.
_SOME_ELEMENTS = 10**6


def check_precision(precision: Precision, device_type: str) -> None:
    """Refuse a precision that DeepSpeed's engine does not support.

    Raises:
        ConfigurationError: fp64, fp16 on a CPU, a loss scale in another dtype than fp16, or replaced layers.
    """
    if precision.replaces_layers:
        raise ConfigurationError(
            f"precision={precision.name!r} changes how layers compute, which DeepSpeed's engine does not know: use "
            "'bf16-mixed', or strategy='fsdp'."
        )
    if precision.parameter_dtype == torch.float64:
        raise ConfigurationError(
            f"precision={precision.name!r} is not known to DeepSpeed: use '32-true', or strategy='fsdp'."
        )
    if precision.loss_scaler() is not None and precision.compute_dtype != torch.float16:
        raise ConfigurationError(
            f"precision={precision.name!r} scales losses in {precision.compute_dtype}, and DeepSpeed scales them in "
            "fp16 only: leave the loss scaler out, or use strategy='fsdp'."
        )
    if device_type == "cpu" and torch.float16 in (precision.compute_dtype, precision.parameter_dtype):
        raise ConfigurationError(
            f"precision={precision.name!r} is refused by DeepSpeed on a CPU: use 'bf16-mixed', or strategy='fsdp'."
        )


def check_settings(options: ZeroOptions, device_type: str) -> None:
    """Refuse settings that DeepSpeed does not know or accept, before any process starts.

    DeepSpeed is imported only where the user gave settings of its own: the import takes some seconds.

    Raises:
        ConfigurationError: naming every setting of the first block with errors.
    """
    if not options.config:
        return
    wrong = list(_complaints(engine_config(options, None, 1, _SOME_ELEMENTS), device_type))
    if wrong:
        raise ConfigurationError(f"DeepSpeed does not take these settings. {'; '.join(wrong)}.")


def _complaints(config: dict[str, Any], device_type: str) -> Iterator[str]:
    """Yield the errors that DeepSpeed's own config class finds in a config."""
    # DS_ACCELERATOR keeps the import from searching for devices. The import itself sets the second variable for good,
    # which would then be inherited by every process that this one starts.
    with library_environment(DS_ACCELERATOR=device_type, PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        from deepspeed.runtime.config import DeepSpeedConfig
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        try:
            # In a process that is a rank already, ``mpu`` gives the number of ranks to compare batch sizes with.
            DeepSpeedConfig(config, mpu=SimpleNamespace(get_data_parallel_world_size=lambda: 1))
        except Exception as error:  # besides pydantic, its parsers raise arbitrary errors for wrong values
            errors: list[Any] = error.errors() if hasattr(error, "errors") else []
            # pydantic reports an unknown key without the closest known one.
            names = list(_names(DeepSpeedZeroConfig)) if getattr(error, "title", "") == "DeepSpeedZeroConfig" else []
            for each in errors:
                where = _where(config, each["loc"])
                if each["type"] == "extra_forbidden":
                    yield f"{where}: not known.{did_you_mean(str(each['loc'][-1]), names).rstrip('?')}".rstrip(".")
                elif each["loc"]:
                    yield f"{where}={each['input']!r}: {each['msg']}"
                else:
                    yield each["msg"].removeprefix("Assertion failed, ").rstrip(".")
            if not errors:
                yield str(error).strip().rstrip(".") or type(error).__name__


def _where(config: Mapping[str, Any], location: tuple[Any, ...]) -> str:
    """Return the dotted key of an entry, which pydantic locates only relative to its block."""
    parts = [str(part) for part in location]
    blocks = (name for name, block in config.items() if isinstance(block, Mapping) and parts and parts[0] in block)
    return ".".join(parts if location and location[0] in config else [*list(blocks)[:1], *parts])


def _names(model: Any) -> Iterator[str]:
    """Yield the names of a pydantic model's fields, and of the fields of models inside it."""
    for name, field in model.model_fields.items():
        yield field.alias or name
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if hasattr(inner, "model_fields"):
                yield from _names(inner)


def engine_config(
    options: ZeroOptions,
    precision: Precision | None,
    world_size: int,
    model_elements: int,
    largest_elements: int | None = None,
    swap_folder: Path | None = None,
) -> dict[str, Any]:
    """Return the config for ``deepspeed.initialize`` and ``zero.Init``.

    Args:
        precision: None for an engine that only holds fp32 weights.
        model_elements: the number of elements of all parameters.
        largest_elements: the number of elements of the largest parameter. Default: ``model_elements``.
        swap_folder: a folder to use in place of ``nvme_path``, so that runs do not share files.
    """
    config = copy.deepcopy(options.config)
    # phalanx counts micro-batches and sets the end of a window on the engine, for which each micro-batch is a full
    # batch.
    config.update(train_batch_size=world_size, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    # phalanx sets the engine's `clip_grad` before each update that clips, from which the engine computes the factor.
    config["gradient_clipping"] = 0.0
    config.update(_precision_blocks(precision) if precision is not None else {})
    # DeepSpeed would reduce and accumulate in the parameters' dtype, which loses small gradients in bf16.
    config.setdefault("communication_data_type", "fp32")
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    config.setdefault("steps_per_print", None)
    # It waits for the device twice in each step.
    config.setdefault("timers", {"throughput": {"enabled": False}})
    for name in ("zero_optimization", "data_types"):
        config[name] = config.get(name) or {}
    config["data_types"].setdefault("grad_accum_dtype", "fp32")
    zero = config["zero_optimization"]
    zero["stage"] = options.stage
    for key, size in _sizes(options, world_size, model_elements).items():
        # DeepSpeed accepts these keys with and without the prefix, so the user may have given either.
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
        # The engine always scales losses in fp16: it halves the scale at each overflow, and doubles it after a while.
        scaler = precision.loss_scaler() or LossScaler()
        power, window = round(math.log2(scaler.scale)), scaler.growth_interval
        return {"fp16": {"enabled": True, "initial_scale_power": power, "loss_scale_window": window, "hysteresis": 1}}
    return {}


def _sizes(options: ZeroOptions, world_size: int, model_elements: int) -> dict[str, int]:
    """Return buckets and thresholds in elements that fit a model: a few hundredths of what its state takes."""
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
        # By default a parameter that is used again within 1e9 elements stays gathered: all of most models.
        "stage3_max_reuse_distance": live,
        "stage3_param_persistence_threshold": min(100_000, model_elements // 1000),
        "stage3_model_persistence_threshold": model_elements // 64,
    }
    if options.uses_nvme:
        # The elements that one rank swaps at a time; the swapper has four such buffers.
        sizes["sub_group_size"] = _between(model_elements // (16 * world_size), 2**18, 1_000_000_000, model_elements)
    return sizes


def _between(wanted: int, low: int, high: int, model_elements: int) -> int:
    return max(2, min(max(wanted, low), high, model_elements))


def _even(size: int) -> int:
    # DeepSpeed asserts that the all-gather bucket divides by two.
    return size + size % 2


def _offload_block(
    zero: dict[str, Any], name: str, device: Offload | None, path: Path | None, sizes: dict[str, int]
) -> None:
    """Set the device of an offload block; ``sizes`` are those of the buffers in front of a disk."""
    if device is None:
        # DeepSpeed takes the mere presence of a block for an offload.
        zero.pop(name, None)
        return
    block = zero[name] = zero.get(name) or {}
    block["device"] = device
    if device == "nvme":
        block["nvme_path"] = str(path)
        for key, size in sizes.items():
            block.setdefault(key, size)
