"""Start and release of DeepSpeed's engine in the existing process group.

Everything here that is private to DeepSpeed is pinned by its version range and covered by the tests.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...framework.core.errors import ConfigurationError
from ...framework.core.patches import patch
from ...framework.distributed.world import World
from .flat_groups import set_full_shape
from .library import ops_environment, quiet_import, restore_warnings
from .outputs import restore_output_support, support_any_output


@contextlib.contextmanager
def backend(world: World) -> Iterator[None]:
    """Make DeepSpeed use this rank's environment, its ops and the existing process group. Collective the first time.

    Raises:
        ConfigurationError: DeepSpeed was imported before, and has chosen another type of device for this process.
    """
    device_type = world.device.type
    with world.variables(), ops_environment(device_type):
        with quiet_import():
            from deepspeed import init_distributed
            from deepspeed.accelerator import get_accelerator
            from deepspeed.ops import __compatible_ops__ as compatible_ops

            if (chosen := get_accelerator().device_name()) != device_type:
                raise ConfigurationError(
                    f"DeepSpeed was imported before phalanx started it, and uses {chosen!r} in this process, while the "
                    f"run uses {device_type!r}: set DS_ACCELERATOR={device_type} before the import, or leave it out."
                )
            # Reductions through shared memory serve DeepSpeed's inference alone, and would be compiled here.
            compatible_ops["deepspeed_shm_comm"] = False
            # DeepSpeed's own detection of a launcher is for processes without a process group.
            init_distributed(dist_init_required=False, verbose=False)
        yield


def start_engine(adapter: nn.Module, optimizer: Optimizer | None, config: dict[str, Any]) -> Any:
    """Return DeepSpeed's engine around an adapter with identical tensors on all ranks. Collective, in ``backend``."""
    import deepspeed
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.engine import DeepSpeedEngine

    support_any_output()
    show_memory = partial(_show_memory, bf16_optimizer.see_memory_usage, config.get("memory_breakdown", False))
    with contextlib.ExitStack() as patches:
        # It broadcasts parameters, which are identical already, and fails on one without dims. Private to DeepSpeed,
        # which has no setting for it: only models that ``zero.Init`` has split are not broadcast.
        patch(patches, DeepSpeedEngine, "_broadcast_model", lambda engine: None)
        # The bf16 optimizer prints the memory in use.
        patch(patches, bf16_optimizer, "see_memory_usage", show_memory)
        engine, *_ = deepspeed.initialize(
            model=adapter,
            optimizer=optimizer,
            model_parameters=None,
            config=config,
            dist_init_required=False,
        )
    return engine


def _show_memory(show: Callable[..., None], is_wanted: bool, message: str, force: bool = False) -> None:
    show(message, force=is_wanted)


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
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.utils import debug, groups

    parameter_offload.FWD_MODULE_STACK.clear()
    # A cache of a method, whose keys are the coordinators and modules of all engines: it would keep each model, and the
    # threads of each engine's process group, until the process ends.
    release = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    for cell in release.__closure__ or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()
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
    restore_warnings()
