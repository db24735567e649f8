"""Imports DeepSpeed and what its engine imports as it begins, for a process from which ranks are forked."""

from __future__ import annotations

import contextlib
import importlib

from .engine import quiet_import

with quiet_import():
    # The last two bring torch's compiler along, which takes as long as DeepSpeed itself.
    for name in (
        "deepspeed",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.module_inject.auto_ep_layer",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
