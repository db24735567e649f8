"""What a run asks for: devices, ranks, strategy and precision, checked before any process starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..core.errors import ConfigurationError, is_count, unknown
from ..core.precision import Precision, resolve_precision
from ..core.registry import STRATEGIES
from ..distributed.world import World, placement
from ..system.launcher_env import Placement, check_devices
from .strategy import Strategy

_ACCELERATORS = {"auto": "auto", "cpu": "cpu", "cuda": "cuda", "gpu": "cuda"}


@dataclass
class Resources:
    """The resolved request."""

    device_type: str
    devices: int
    indices: list[int] | None
    num_nodes: int
    strategy: Strategy
    precision: Precision
    place: Placement
    auto: bool = False
    """Whether the strategy is left to phalanx: ``strategy`` is then what it starts from, and a fit may take another."""

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.devices * self.num_nodes

    @property
    def data_size(self) -> int:
        """Parts into which the data is shared out."""
        return self.strategy.data_size(self.world_size)

    @property
    def must_launch(self) -> bool:
        """Whether ranks are still to be started: more than one is asked for, and no launcher started this process."""
        return self.world_size > 1 and self.place.launcher is None and self.place.size == 1

    def connect(self) -> World:
        """Join the process group and take the device. Collective."""
        if self.place.local_rank == 0:
            self.strategy.prepare(self.device_type, self.precision)
        world = self.strategy.connect(self.device_type, self.num_nodes, self.precision)
        if self.indices is not None:
            world.device = torch.device("cuda", self.indices[world.local_rank])
            torch.cuda.set_device(world.device)
        return world


def resolve_resources(
    accelerator: str,
    strategy: str | Strategy,
    devices: int | str | list[int],
    num_nodes: int,
    precision: str | int | Precision | None,
) -> Resources:
    """Check and resolve what a Trainer or a Fabric was asked for.

    Raises:
        UnknownNameError: accelerator, strategy or precision is not known.
        ConfigurationError: a number does not fit the machine, the launcher or the strategy.
    """
    device_type = _device_type(accelerator)
    resolved_precision = resolve_precision(precision)
    if not is_count(num_nodes, 1):
        raise ConfigurationError(f"num_nodes={num_nodes!r} must be a whole number of at least 1.")
    place = placement(num_nodes)
    count, indices = _devices(devices, device_type, place)
    if devices != "auto":
        check_devices(count, place, num_nodes)
    elif place.launcher is not None or place.size > 1:
        num_nodes = place.num_nodes
    if num_nodes > 1 and place.launcher is None:
        raise ConfigurationError(
            f"num_nodes={num_nodes} needs a launcher on every node: start the script with torchrun "
            "--nnodes, or under SLURM with srun."
        )
    resolved_strategy = _strategy(strategy, count * num_nodes)
    resolved_strategy.check(count * num_nodes, device_type, num_nodes, resolved_precision)
    return Resources(
        device_type, count, indices, num_nodes, resolved_strategy, resolved_precision, place, strategy == "auto"
    )


def _device_type(accelerator: str) -> str:
    if not isinstance(accelerator, str) or accelerator not in _ACCELERATORS:
        raise unknown("accelerator", str(accelerator), _ACCELERATORS)
    device_type = _ACCELERATORS[accelerator]
    if device_type == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            f"accelerator={accelerator!r} but torch sees no CUDA device: use 'cpu', or install a CUDA build of torch."
        )
    return device_type


def _devices(devices: int | str | list[int], device_type: str, place: Placement) -> tuple[int, list[int] | None]:
    """Return how many ranks each node gets, and the devices' indices where they are listed."""
    available = torch.cuda.device_count() if device_type == "cuda" else 0
    given: Any = devices
    if isinstance(devices, str) and devices.strip().lstrip("-").isdigit():
        devices = int(devices)
    if devices == "auto" or devices == -1:
        if place.launcher is not None or place.size > 1:
            return place.local_size, None
        return (available if device_type == "cuda" else 1), None
    if isinstance(devices, list):
        if device_type != "cuda":
            raise ConfigurationError(f"devices={given!r} lists CUDA devices, but the accelerator is {device_type!r}.")
        if not devices or len(set(devices)) != len(devices) or not all(0 <= index < available for index in devices):
            raise ConfigurationError(f"devices={given!r} must list different indices from 0 to {available - 1}.")
        return len(devices), devices
    if not is_count(devices, 1):
        raise ConfigurationError(
            f"devices={given!r} must be 'auto', a number of at least 1, or a list of CUDA indices."
        )
    if device_type == "cuda" and devices > available:
        raise ConfigurationError(f"devices={devices} but torch sees {available} CUDA device(s).")
    return devices, None


def _strategy(strategy: str | Strategy, world_size: int) -> Strategy:
    if isinstance(strategy, Strategy):
        return strategy
    if not isinstance(strategy, str):
        hint = f" Make an object of it: {strategy.__name__}(...)." if isinstance(strategy, type) else ""
        raise ConfigurationError(f"strategy={strategy!r} must be a name or a Strategy object.{hint}")
    if strategy == "auto":
        strategy = "single" if world_size == 1 else "ddp"
    built: Strategy = STRATEGIES.load(strategy)()
    return built
