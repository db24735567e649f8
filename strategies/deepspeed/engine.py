"""Start and release of DeepSpeed's engine in the existing process group.

Everything here that is private to DeepSpeed is pinned by its version range and covered by the tests.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...framework.core.errors import ConfigurationError
from ...framework.distributed.world import World
from ...framework.system.environment import library_environment
from .ops import load_ops
from .outputs import restore_output_support, support_any_output
from .pieces import set_full_shape


class _NoHints(logging.Filter):
    """Drops two needless warnings of DeepSpeed: that there is no GPU, and that the user's step is not a tensor."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(("A module has unknown inputs or outputs type", "Setting accelerator to"))


_NO_HINTS = _NoHints()
# The process groups that DeepSpeed's own calls create.
_DEPRECATED = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor|_\w+)` is deprecated"


@contextlib.contextmanager
def backend(world: World, ops: Iterable[str]) -> Iterator[None]:
    """Make DeepSpeed use this rank's environment, its ops and the existing process group. Collective the first time.

    Raises:
        ConfigurationError: DeepSpeed was imported before, and has chosen another type of device for this process.
    """
    device_type = world.device.type
    with world.variables():
        # DeepSpeed chooses the type of device at its import: a GPU wherever it finds one.
        with library_environment(DS_ACCELERATOR=device_type), quiet_import():
            from deepspeed import init_distributed
            from deepspeed.accelerator import get_accelerator
            from deepspeed.ops import __compatible_ops__ as compatible_ops

            if (chosen := get_accelerator().device_name()) != device_type:
                raise ConfigurationError(
                    f"DeepSpeed was imported before phalanx started it, and uses {chosen!r} in this process, while the "
                    f"run uses {device_type!r}: set DS_ACCELERATOR={device_type} before the import, or leave it out."
                )
            load_ops(ops, device_type)
            # Reductions through shared memory serve DeepSpeed's inference alone, and would be compiled here.
            compatible_ops["deepspeed_shm_comm"] = False
            # DeepSpeed's own detection of a launcher is for processes without a process group.
            init_distributed(dist_init_required=False, verbose=False)
        yield


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Import DeepSpeed quickly and without its printed list of ops, and suppress its needless warnings afterwards."""
    logger = logging.getLogger("DeepSpeed")
    if _NO_HINTS not in logger.filters:
        logger.addFilter(_NO_HINTS)
        warnings.filterwarnings("ignore", _DEPRECATED, FutureWarning)
    # Its autotuner imports mlflow where that is installed: three quarters of the time that the import takes.
    hidden = {"mlflow": None} if not sys.modules.keys() & {"deepspeed", "mlflow"} else {}
    sys.modules.update(hidden)  # type: ignore[arg-type]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        for name in hidden:
            del sys.modules[name]


def import_deepspeed(device_type: str) -> None:
    """Import DeepSpeed and what its engine imports at its start, without initializing a device.

    Every rank would otherwise spend these seconds itself, and have a copy of the modules in its own memory.
    """
    with library_environment(DS_ACCELERATOR=device_type, PYTORCH_NVML_BASED_CUDA_CHECK="1"), quiet_import():
        # The last two import torch's compiler, which takes as long again.
        for name in ("", ".runtime.zero.muon.muon_optimizer", ".module_inject.auto_ep_layer"):
            # A module that a later version has moved costs time at the start of each rank, and nothing else.
            with contextlib.suppress(ImportError):
                importlib.import_module(f"deepspeed{name}")


def start_engine(adapter: nn.Module, optimizer: Optimizer | None, config: dict[str, Any]) -> Any:
    """Return DeepSpeed's engine around an adapter with identical tensors on all ranks. Collective, in ``backend``."""
    with _nothing_sent(), _memory_shown(config.get("memory_breakdown", False)):
        import deepspeed

        support_any_output()

        engine, *_ = deepspeed.initialize(
            model=adapter,
            optimizer=optimizer,
            model_parameters=None,
            config=config,
            dist_init_required=False,
        )
    return engine


@contextlib.contextmanager
def _nothing_sent() -> Iterator[None]:
    """Prevent the engine from broadcasting parameters, which are identical already; it fails on one without dims.

    Private to DeepSpeed, which has no setting for it: only models that ``zero.Init`` has split are not broadcast.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    sends = DeepSpeedEngine._broadcast_model
    DeepSpeedEngine._broadcast_model = lambda engine: None
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = sends


@contextlib.contextmanager
def _memory_shown(asked: bool) -> Iterator[None]:
    """Prevent the bf16 optimizer from printing the memory in use."""
    from deepspeed.runtime import bf16_optimizer

    shows = bf16_optimizer.see_memory_usage
    bf16_optimizer.see_memory_usage = lambda message, force=False: shows(message, force=asked)
    try:
        yield
    finally:
        bf16_optimizer.see_memory_usage = shows


class Splitter:
    """Shards parameters over the ranks, one by one. To be used in ``backend``.

    Args:
        config: the engine's config.
    """

    # ZeRO++'s group for a second partition inside a node, which DeepSpeed creates only once in a process.
    second_group: Any = None

    def __init__(self, config: dict[str, Any]) -> None:
        # It would replace torch's function of linear layers for good.
        zero = {**config["zero_optimization"], "memory_efficient_linear": False}
        self._config = {**config, "zero_optimization": zero}
        self._split: Callable[[list[nn.Parameter]], None] | None = None

    def split(self, parameter: Any) -> None:
        """Shard a parameter, from the data of rank 0. Collective."""
        shape = parameter.shape
        # DeepSpeed broadcasts the bytes of the last dim, which has to exist, and elements next to each other.
        parameter.data = parameter.data.reshape(shape or (1,))
        if parameter.stride(-1) != 1:
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        if self._split is None:
            from deepspeed import zero

            holder = nn.Module()
            holder.register_parameter("parameter", parameter)
            made = zero.Init(holder, config_dict_or_path=self._config, zero_param_parallel_group=Splitter.second_group)
            Splitter.second_group = made.zero_param_process_group
            self._split = parameter.convert_to_zero_parameters
        else:
            self._split([parameter])
        if not shape:
            set_full_shape(parameter, shape)


def use_local_device(world: World) -> None:
    """Make forward passes of stage 3 create tensors on this rank's device, until ``release_globals``.

    DeepSpeed takes the local rank for the device's number, which it is not if the user has listed devices.
    """
    from deepspeed.runtime.zero import utils

    index = world.local_rank if world.device.index is None else world.device.index
    utils.os = SimpleNamespace(environ={"LOCAL_RANK": str(index)})


def stop_engine(engine: Any) -> None:
    """Remove the engine's hooks, and release the references in DeepSpeed's modules. Not collective."""
    engine.destroy()
    optimizer = engine.optimizer
    # Reference cycles through the engine's hooks keep the flat buffers and all other tensors alive.
    for part in (optimizer, getattr(optimizer, "optimizer", None), engine):
        for name in list(vars(part)) if part is not None else ():
            # Not delattr, which classes of DeepSpeed and torch.nn override.
            object.__delattr__(part, name)
    release_globals()
    gc.collect()


def release_globals() -> None:
    """Reset the global state of DeepSpeed's and torch's modules that DeepSpeed has changed."""
    from deepspeed.runtime.zero import parameter_offload, utils
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses
    from deepspeed.utils import debug, groups

    parameter_offload.FWD_MODULE_STACK.clear()
    utils.os = os
    restore_output_support()
    linear = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", None)
    if linear is not None:
        torch.nn.functional.linear = linear
    for name in ("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP"):
        group = getattr(groups, name)
        if group is not None:
            setattr(groups, name, None)
            with contextlib.suppress(ValueError, RuntimeError, AssertionError):
                torch.distributed.destroy_process_group(group)
    Splitter.second_group = None
    debug.debug_clear_module_and_param_names()
    logging.getLogger("DeepSpeed").removeFilter(_NO_HINTS)
    filters: Any = warnings.filters
    filters[:] = [one for one in filters if one[1] != re.compile(_DEPRECATED, re.IGNORECASE)]
