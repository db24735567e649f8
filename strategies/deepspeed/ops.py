"""DeepSpeed's C++ ops: which ones a run needs, and loading them.

DeepSpeed builds an op at its first use, which is inside a rank: without a message, while other ranks wait in a
collective, and without end if an earlier build was killed. Therefore the first process of a node builds missing ops
before the ranks meet, in a child process with a time limit, and each rank then only loads them.

Run as a program (``python -m phalanx.strategies.deepspeed.ops``) it builds all ops that a CPU needs, those named on
the command line, or after ``--without`` all others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...framework.core.errors import ConfigurationError
from .arguments import ZeroOptions
from .build import OPS, ensure_ops, is_built, missing_ops, op_folder
from .config import check_settings
from .toolchain import check_toolchain, require_deepspeed


def needed_ops(options: ZeroOptions) -> list[str]:
    """Return the ops that a run with these options loads, in the order of loading."""
    ops = [] if options.offload_optimizer is None else ["cpu_adam"]
    if options.uses_nvme:
        # The second resolves symbols of the first as it is loaded.
        ops += ["pin_memory", "async_io"]
    return ops


def check_ops(options: ZeroOptions, device_type: str, strategy: str) -> None:
    """Refuse a machine or settings that DeepSpeed cannot start with. Called before any process starts.

    Raises:
        ConfigurationError: DeepSpeed is not installed, a tool to build a missing op is not installed, or DeepSpeed does
            not know a setting.
    """
    require_deepspeed(strategy)
    check_settings(options, device_type)
    check_toolchain(missing_ops(needed_ops(options), device_type), device_type)


def load_ops(names: Iterable[str], device_type: str = "cpu") -> None:
    """Load ops that are built, so that DeepSpeed finds them loaded.

    DeepSpeed's own way queries the processor's features (2 s for each op), runs ninja, and takes a lock file that
    outlives a process killed in between.
    """
    # OpBuilder.load looks into _loaded_ops first, in DeepSpeed 0.19.8.
    from deepspeed.ops.op_builder import PinMemoryBuilder
    from deepspeed.ops.op_builder.builder import OpBuilder

    for name in names:
        folder = op_folder(name, device_type)
        if name not in OpBuilder._loaded_ops and is_built(folder, name, device_type):
            OpBuilder._loaded_ops[name] = _import(name, folder)
            if name == "pin_memory":
                # Makes its symbols global, which async_io needs.
                PinMemoryBuilder().load()


def _import(name: str, folder: Path) -> Any:
    # In the way in which torch 2.13 imports compiled extensions.
    from torch.utils.cpp_extension import _import_module_from_library

    return _import_module_from_library(name, str(folder), True)


def main(names: list[str]) -> int:
    """Build ops for a CPU from the command line; return the exit code."""

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        require_deepspeed("zero2")
        left_out = names[1:] if names[:1] == ["--without"] else []
        wanted = [name for name in OPS if name not in left_out] if left_out or not names else names
        check_toolchain(missing_ops(wanted))
        ensure_ops(wanted, note)
    except ConfigurationError as error:
        note(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
