"""Imports DeepSpeed and the modules that its engine imports at its start, in the process that ranks are forked from.

Every rank would otherwise spend these seconds itself, and have a copy of the modules in its own memory.
"""

from __future__ import annotations

import contextlib
import importlib

from ...framework.system.environment import library_environment
from .engine import quiet_import

# Imported by the engine of DeepSpeed 0.19.8. The last two import torch's compiler, which takes as long again.
_MODULES = (
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer",
)


def import_deepspeed(device_type: str) -> None:
    """Import DeepSpeed for ranks on this type of device, without initializing one."""
    with library_environment(DS_ACCELERATOR=device_type, PYTORCH_NVML_BASED_CUDA_CHECK="1"), quiet_import():
        for name in _MODULES:
            # A module that a later version has moved costs time at the start of each rank, and nothing else.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
