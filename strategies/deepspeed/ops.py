"""DeepSpeed's C++ ops: which are needed, and having them built before anyone waits for them.

DeepSpeed builds an op where it is first used, which is inside a rank: without a word, with other ranks waiting for a
collective, and for ever when an earlier build was killed. So a node's first rank builds what is missing beforehand, in
a process of its own with a time limit, and every rank then loads what is there.

Run as a program it builds all ops of a CPU, or those named on the command line.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from ...framework.core.errors import ConfigurationError
from .build import OPS, is_built, missing_ops, op_folder
from .build import ensure_ops as ensure_ops
from .config import ZeroOptions
from .toolchain import check_toolchain, require_deepspeed
from .values import check_values


def needed_ops(options: ZeroOptions, device_type: str) -> list[str]:
    """Return the ops that a run with these options loads, in the order in which they have to be loaded."""
    ops = []
    if options.offload_optimizer is not None:
        ops.append("cpu_adam")
    elif device_type == "cpu" or shutil.which("nvcc"):
        # Without a CUDA compiler torch's own fused form does the same.
        ops.append("fused_adam")
    if device_type == "cpu" and sys.platform == "linux":
        ops.append("deepspeed_shm_comm")
    if options.uses_nvme:
        ops += ["pin_memory", "async_io"]
    return ops


def check_ops(options: ZeroOptions, device_type: str, strategy: str) -> None:
    """Refuse a machine or settings that DeepSpeed cannot start with. Called before any process starts.

    Raises:
        ConfigurationError: DeepSpeed is not installed, or what a missing op is built with is not, or DeepSpeed does not
            know a setting.
    """
    require_deepspeed(strategy)
    check_values(options, device_type)
    check_toolchain(missing_ops(needed_ops(options, device_type)))


def load_ops(names: Iterable[str]) -> None:
    """Load ops that are built, so that DeepSpeed finds them loaded.

    Its own way asks the processor for its features (2 s for each op), runs ninja, and takes a lock that outlives a
    process that is killed while it holds it.
    """
    from deepspeed.ops.op_builder import PinMemoryBuilder
    from deepspeed.ops.op_builder.builder import OpBuilder

    for name in names:
        folder = op_folder(name)
        if name not in OpBuilder._loaded_ops and is_built(folder, name):
            OpBuilder._loaded_ops[name] = _imported(name, folder / f"{name}.so")
            if name == "pin_memory":
                PinMemoryBuilder().load()  # lets later ops find its symbols


def _imported(name: str, file: Path) -> Any:
    spec = spec_from_file_location(name, file, loader=ExtensionFileLoader(name, str(file)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(names: list[str]) -> int:
    """Build ops for a CPU from the command line; return the exit code."""

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        require_deepspeed("zero2")
        wanted = names or list(OPS)
        check_toolchain(missing_ops(wanted))
        ensure_ops(wanted, note)
    except ConfigurationError as error:
        note(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
