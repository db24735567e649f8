"""``accelerate.utils``: what programs import from there."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ...framework.core.foreign_names import ACCELERATE_INTERNAL, ACCELERATE_UTILS
from .configuration import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from .functions import find_executable_batch_size, release_memory, set_seed
from .operations import (
    broadcast,
    broadcast_object_list,
    compare_versions,
    concatenate,
    convert_to_fp32,
    extract_model_from_parallel,
    find_batch_size,
    gather,
    gather_object,
    is_compiled_module,
    is_namedtuple,
    is_torch_tensor,
    is_torch_version,
    listify,
    pad_across_processes,
    patch_environment,
    reduce,
    save,
    send_to_device,
    str_to_bool,
    tqdm,
    wait_for_everyone,
)
from .plugins import DeepSpeedPlugin, DynamoBackend, FullyShardedDataParallelPlugin, TorchDynamoPlugin

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "LoggerType",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
    "broadcast",
    "broadcast_object_list",
    "compare_versions",
    "concatenate",
    "convert_to_fp32",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "is_compiled_module",
    "is_namedtuple",
    "is_torch_tensor",
    "is_torch_version",
    "listify",
    "pad_across_processes",
    "patch_environment",
    "reduce",
    "release_memory",
    "save",
    "send_to_device",
    "set_seed",
    "str_to_bool",
    "tqdm",
    "wait_for_everyone",
]


# Imported when asked for: they are Accelerate's own.
_LARGE_MODELS = {
    "compute_module_sizes",
    "get_balanced_memory",
    "get_max_memory",
    "infer_auto_device_map",
    "load_checkpoint_in_model",
    "offload_state_dict",
}


# Names of packages that differ from those in ``is_..._available``.
_PACKAGES = {
    "bnb": "bitsandbytes",
    "4bit_bnb": "bitsandbytes",
    "8bit_bnb": "bitsandbytes",
    "fp8": "torchao",
    "lomo": "lomo_optim",
    "megatron_lm": "megatron",
    "torchdata_stateful_dataloader": "torchdata",
    "transformer_engine_mxfp8": "transformer_engine",
}
# Hardware, and libraries for it, that phalanx does not train on.
_ABSENT = (
    *("hpu", "mlu", "mps", "musa", "neuron", "npu", "rocm", "sdaa", "torch_xla", "xpu", "xccl", "pippy"),
    "bitsandbytes_multi_backend",
)
_PRESENT = ("bf16", "fp16", "weights_only")


class LoggerType(str, Enum):
    """The trackers that ``log_with`` names; other ones are given as ``Logger`` objects."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"


class PrecisionType(str, Enum):
    """The names of ``mixed_precision``."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"


def __getattr__(name: str) -> Any:
    if name.startswith("is_") and name.endswith("_available"):
        return _availability(name)
    if name in _LARGE_MODELS:
        return getattr(import_module(".large_models", __package__), name)
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ImportError(f"{__name__} has no {name}: {ACCELERATE_UTILS.get(name, ACCELERATE_INTERNAL)}", name=name)


def _availability(name: str) -> Callable[..., bool]:
    """Return the function of a name such as ``is_wandb_available``."""
    what = name.removeprefix("is_").removesuffix("_available")

    def is_available(*args: object, **kwargs: object) -> bool:
        if what == "cuda":
            return torch.cuda.is_available()
        if what in _PRESENT or what in _ABSENT:
            return what in _PRESENT
        return find_spec(_PACKAGES.get(what, what)) is not None

    is_available.__name__ = is_available.__qualname__ = name
    is_available.__doc__ = f"Return whether {_PACKAGES.get(what, what)} can be used."
    return is_available
