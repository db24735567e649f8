"""The process group's backends: gloo on the CPU, and that of the accelerator beside it."""

from __future__ import annotations

import torch.distributed as dist

from ..core.errors import ConfigurationError
from .devices import shown_type


def backend_of(device_type: str) -> str | None:
    """Return torch's backend for collectives on devices of a type; None if this build of torch has none.

    NCCL for CUDA, RCCL under the same name for ROCm, XCCL for XPU; others as they are registered with torch.
    """
    if device_type == "cpu":
        return "gloo"
    if device_type == "cuda":
        return "nccl"
    name = dist.Backend.default_device_backend_map.get(device_type)
    # torch names gloo for MPS, whose tensors it cannot read.
    if name in (None, "gloo") or not dist.is_backend_available(name):
        return None
    return str(name)


def has_backend(device_type: str) -> bool:
    """Whether several ranks can compute together on devices of a type."""
    return dist.is_available() and backend_of(device_type) is not None


def group_backend(device_type: str) -> str:
    """Return the backend of the process group of ranks on a type of devices: ``"cpu:gloo,cuda:nccl"``.

    Raises:
        ConfigurationError: there is none.
    """
    check_backend(device_type, 2)
    return "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:{backend_of(device_type)}"


def check_backend(device_type: str, num_ranks: int) -> None:
    """Refuse several ranks on devices of a type for which torch has no collectives.

    Raises:
        ConfigurationError: there are none.
    """
    if num_ranks > 1 and not has_backend(device_type):
        raise ConfigurationError(
            f"{num_ranks} ranks on {shown_type(device_type)} devices need a backend of torch.distributed for them, and "
            "this build of torch has none: use devices=1, or accelerator='cpu'."
        )
