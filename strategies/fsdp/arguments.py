"""Checks of the arguments of ``FSDPStrategy``, and those of torch that follow from them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...framework.core.degrees import Degrees, Layout
from ...framework.core.errors import ConfigurationError, is_count, unknown
from ...framework.core.precision import Precision
from ..context.sharing import NO_COMPILING
from .mesh import Replicas
from .units import NO_RECOMPUTATION, Checkpointed

_GATHERS = ("rank_zero", "all", "none")
_NO_COMPILING_OF_EXPERTS = (
    "exchanges other numbers of tokens in every step under parallel={'ep': ...}: leave compile out, or leave ep out"
)
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


def check_arguments(
    replicas: Replicas, tensor_parallel: int, prefetch: int, reduce_dtype: Any, gather_weights: Any
) -> None:
    """Check numbers of ranks and units, the dtype in which gradients are averaged, and which ranks get full weights.

    Raises:
        ConfigurationError: one is invalid.
    """
    for name, given, least in (
        ("replicas", replicas, 1),
        ("tensor_parallel", tensor_parallel, 1),
        ("prefetch", prefetch, 0),
    ):
        if not is_count(given, least) and (name, given) != ("replicas", "node"):
            raise ConfigurationError(f"FSDPStrategy({name}={given!r}): it must be a whole number of at least {least}.")
    if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point):
        raise ConfigurationError(
            f"FSDPStrategy(reduce_dtype={reduce_dtype!r}): it must be a floating-point dtype such as torch.float32, or "
            "None."
        )
    if gather_weights not in _GATHERS:
        raise unknown("gather_weights", str(gather_weights), _GATHERS)


def check_flags(**flags: Any) -> None:
    """Check arguments that must be bools.

    Raises:
        ConfigurationError: one is not a bool.
    """
    for name, given in flags.items():
        if not isinstance(given, bool):
            raise ConfigurationError(f"FSDPStrategy({name}={given!r}): it must be True or False.")


def check_precision(precision: Precision, layout: Layout) -> None:
    """Refuse a precision that changes how layers compute, if layers are split over ranks.

    Raises:
        ConfigurationError: it is such a precision.
    """
    for axis, degree in (("tensor_parallel", layout.tp), ("ep", layout.ep)):
        if degree > 1 and precision.replaces_layers:
            raise ConfigurationError(
                f"precision={precision.name!r} changes how layers compute, and {axis}={degree} splits layers over "
                f"ranks: use 'bf16-mixed', or leave {axis} out."
            )


def why_not_compiled(checkpointing: Checkpointed, degrees: Degrees) -> str:
    """Return why the passes of a strategy cannot be compiled, empty if they can."""
    if "cp" in degrees.used:
        return NO_COMPILING
    if "ep" in degrees.used:
        return _NO_COMPILING_OF_EXPERTS
    return NO_RECOMPUTATION if checkpointing is not False else ""


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
