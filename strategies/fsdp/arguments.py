"""Checks of the arguments of ``FSDPStrategy``, and those of torch that follow from them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...framework.core.errors import ConfigurationError, is_count
from ...framework.core.precision import Precision

GATHERS = ("rank_zero", "all", "none")
# Arguments of other frameworks, and their equivalents.
ELSEWHERE = {
    "ddp_comm_hook": "use reduce_dtype=torch.bfloat16 to reduce gradients in fewer bits",
    "auto_wrap_policy": "use units=..., a class, a size or a function",
    "sharding_strategy": "use strategy='fsdp', 'hsdp' or 'ddp', and reshard_after_forward",
    "mixed_precision": "use Trainer(precision=...), and reduce_dtype",
    "activation_checkpointing_policy": "use activation_checkpointing=True, classes or a function",
    "state_dict_type": "leave it out, checkpoints are sharded files with the names of one process",
    "use_orig_params": "leave it out, parameters keep their names",
    "sync_module_states": "leave it out, all ranks start from rank 0's weights",
    "device_mesh": "use Trainer(parallel=...), or replicas and tensor_parallel",
}


def check_count(name: str, given: Any, least: int, known: str | None = None) -> None:
    """Check a number of ranks or units; ``known`` is a word that is allowed too.

    Raises:
        ConfigurationError: it is not a whole number of at least ``least``.
    """
    if known is None and not is_count(given, least):
        raise ConfigurationError(f"FSDPStrategy({name}={given!r}): it must be a whole number of at least {least}.")


def check_flags(**flags: Any) -> None:
    """Check arguments that must be bools.

    Raises:
        ConfigurationError: one is not a bool.
    """
    for name, given in flags.items():
        if not isinstance(given, bool):
            raise ConfigurationError(f"FSDPStrategy({name}={given!r}): it must be True or False.")


def check_reduce_dtype(given: Any) -> None:
    """Check the dtype in which gradients are averaged.

    Raises:
        ConfigurationError: it is neither None nor a floating-point dtype.
    """
    if given is not None and not (isinstance(given, torch.dtype) and given.is_floating_point):
        raise ConfigurationError(
            f"FSDPStrategy(reduce_dtype={given!r}): it must be a floating-point dtype such as torch.float32, or None."
        )


def check_precision(precision: Precision, tensor_parallel: int) -> None:
    """Refuse a precision that changes how layers compute, if layers are split over ranks.

    Raises:
        ConfigurationError: it is such a precision.
    """
    if tensor_parallel > 1 and precision.replaces_layers:
        raise ConfigurationError(
            f"precision={precision.name!r} changes how layers compute, and tensor_parallel={tensor_parallel} splits "
            "layers over ranks: use 'bf16-mixed', or leave tensor_parallel out."
        )


def mixed_policy(precision: Precision, reduce_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return the dtypes in which torch gathers parameters and reduces gradients."""
    narrow = precision.compute_dtype if precision.is_mixed else None
    reduce = reduce_dtype or precision.reduction_dtype
    # Only set if it differs from the default: an explicit dtype makes torch store copies of the gradients, which
    # costs their memory again.
    reduces_as_computed = reduce == (narrow or precision.parameter_dtype)
    return MixedPrecisionPolicy(
        param_dtype=narrow, reduce_dtype=None if reduces_as_computed else reduce, cast_forward_inputs=False
    )
