"""``PartialState`` and the states of an Accelerator: the place of this process, and the micro-batch it is in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...framework.fabric.fabric import Fabric
from .arguments import default_devices
from .configuration import DistributedType


class PartialState:
    """The rank of this process, and the verbs that need no module."""

    def __init__(self, cpu: bool = False, **options: Any) -> None:
        self._fabric = Fabric(accelerator="cpu" if cpu else "auto", devices=default_devices())

    def __getattr__(self, name: str) -> Any:
        if name == "_fabric":
            raise AttributeError(name)
        return getattr(self._fabric, name)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._fabric.device

    default_device = device

    @property
    def initialized(self) -> bool:
        """True: the state exists."""
        return True

    @property
    def use_distributed(self) -> bool:
        """Whether there are several ranks."""
        return self._fabric.world_size > 1

    @property
    def distributed_type(self) -> DistributedType:
        """How the work is spread over ranks."""
        return distributed_type_of(self._fabric)

    def on_local_process(self, function: Callable[..., Any] | None = None, local_process_index: int = 0) -> Any:
        """Decorator: run the function on one rank of each node and return None on the others."""
        return on_local_process(self._fabric, function, local_process_index)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Give each rank its part of a list, a tuple, a dict or a tensor."""
        return self._fabric.split_between_processes(inputs, apply_padding)


class AcceleratorState(PartialState):
    """The state of an Accelerator.

    Attributes:
        mixed_precision: The name of the precision.
        deepspeed_plugin: The plug-in that was given to the Accelerator.
        fsdp_plugin: The same.
    """

    def __init__(self, fabric: Fabric, mixed_precision: str, deepspeed_plugin: Any, fsdp_plugin: Any) -> None:
        self._fabric = fabric
        self.mixed_precision = mixed_precision
        self.deepspeed_plugin = deepspeed_plugin
        self.fsdp_plugin = fsdp_plugin


class GradientState:
    """The micro-batch that an Accelerator is in."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-batch ends its window."""
        return self._fabric.sync_gradients

    @property
    def num_steps(self) -> int:
        """The number of micro-batches in the window."""
        return self._fabric.gradient_accumulation_steps

    def __getattr__(self, name: str) -> Any:
        sentence = {
            "end_of_dataloader": "read end of the loader that prepare returned.",
            "remainder": "gather_for_metrics leaves out the rows of samples that were repeated.",
        }.get(name, "it has sync_gradients and num_steps.")
        raise AttributeError(f"gradient_state has no {name}: {sentence}")


def distributed_type_of(fabric: Fabric) -> DistributedType:
    """Return how the work is spread over ranks."""
    traits = fabric.strategy.traits
    if traits.shards_state:
        return DistributedType.DEEPSPEED if traits.takes_one_optimizer else DistributedType.FSDP
    if fabric.world_size == 1:
        return DistributedType.NO
    return DistributedType.MULTI_GPU if fabric.device.type == "cuda" else DistributedType.MULTI_CPU


def on_local_process(fabric: Fabric, function: Callable[..., Any] | None, local_process_index: int | None) -> Any:
    """Return a function that runs on one rank of each node, or a decorator."""
    if function is None:
        return functools.partial(on_local_process, fabric, local_process_index=local_process_index)
    run = function

    @functools.wraps(run)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs) if fabric.local_rank == (local_process_index or 0) else None

    return wrapped
