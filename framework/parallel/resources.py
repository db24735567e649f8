"""``Resources``: the devices, ranks, strategy and precision of a run, checked before any process starts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..core.accelerators import accelerator_type, num_devices
from ..core.degrees import Degrees, Layout, resolve_degrees
from ..core.errors import ConfigurationError, UnknownNameError, is_count, unknown
from ..core.precision import Precision, resolve_precision
from ..core.registry import STRATEGIES, automatic
from ..distributed.backends import check_backend, has_backend
from ..distributed.devices import is_assigned_one_device, listed_devices, shown_type
from ..distributed.rendezvous import is_initialized
from ..distributed.world import World, placement
from ..system.environment import query_devices_by_nvml, usable_cores
from ..system.launcher_env import Placement, check_devices
from .strategy import Strategy

# For the user's own queries, before ranks are forked from a notebook.
query_devices_by_nvml()

_ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "xpu", "mps")
"""The names that are listed. Those of other backends are known once torch has loaded them."""
_LOADED_BY_BACKENDS = ("hpu", "npu", "mlu", "mtia", "maia", "musa")
_MAKER = {
    "gpu": "one",
    "cuda": "CUDA or ROCm",
    "xpu": "Intel GPUs",
    "mps": "Apple silicon",
}
# Devices that other frameworks support. Some of their names are close to 'gpu'.
_NO_DEVICES = ("tpu", "ipu", "xla")


@dataclass
class Resources:
    """The devices, ranks, strategy and precision of a Trainer or a Fabric."""

    device_type: str
    devices: int
    indices: list[int] | None
    num_nodes: int
    strategy: Strategy
    precision: Precision
    place: Placement
    auto: bool = False
    """Whether ``strategy="auto"`` was given: a fit may replace ``strategy`` by one that fits into memory."""
    degrees: Degrees = field(default_factory=Degrees)
    """The degrees of parallelism that were given, by ``parallel=`` or by the strategy's own arguments."""
    launched: Placement | None = None
    """The place of this process among all ranks, if rank 0 alone uses the device and the other ranks skip the work."""

    @property
    def world_size(self) -> int:
        """The number of ranks over all nodes."""
        return self.devices * self.num_nodes

    @property
    def data_size(self) -> int:
        """The number of shards of the data."""
        return self.layout.data_size

    @property
    def layout(self) -> Layout:
        """The number of ranks along each axis."""
        return self.strategy.degrees.lay_out(self.world_size, self.strategy.rest)

    @property
    def libraries(self) -> tuple[str, ...]:
        """Modules that every rank imports: ranks are forked from a process that has imported them."""
        names = (*self.strategy.libraries, *self.precision.libraries)
        return tuple(name.format(device_type=self.device_type) for name in names)

    @property
    def must_launch(self) -> bool:
        """Whether ranks must be started: several are requested, and no launcher has started this process."""
        return self.world_size > 1 and self.place.launcher is None and self.place.size == 1

    @property
    def crowding(self) -> str | None:
        """A warning if there are more ranks on this machine's CPU than it has cores; else None."""
        cores = usable_cores()
        # Ranks that phalanx has started follow a process that has shown it.
        if self.place.launcher == "phalanx" or self.device_type != "cpu" or self.devices <= cores:
            return None
        share = "one core" if cores == 1 else f"{cores} cores"
        return (
            f"{self.devices} ranks share {share}, so each of them waits for the others most of the time: set "
            f"devices to at most {cores}, or use more machines."
        )

    def update_placement(self) -> None:
        """Read this process's rank again. Called in a rank that was forked after the placement was first read."""
        self.place = placement(self.num_nodes)

    def connect(self) -> World:
        """Join the process group and take the device. Collective."""
        if self.place.local_rank == 0:
            self.strategy.prepare(self.device_type, self.precision)
        with listed_devices(self.indices):
            world = self.strategy.connect(self.device_type, self.num_nodes, self.precision)
        self.precision.check_device(world.device)
        return world


class RankProperties:
    """The place of a Trainer's or a Fabric's process among the ranks."""

    @property
    def _resources(self) -> Resources:
        raise NotImplementedError

    @property
    def world_size(self) -> int:
        """The number of ranks over all nodes."""
        return self._resources.world_size

    @property
    def global_rank(self) -> int:
        """This process's rank among all, from 0."""
        return self._resources.place.rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its node, from 0."""
        return self._resources.place.local_rank

    @property
    def node_rank(self) -> int:
        """The number of this process's node, from 0."""
        return self._resources.place.node_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0


def resolve_resources(
    accelerator: str,
    strategy: str | Strategy,
    devices: int | str | list[int],
    num_nodes: int,
    precision: str | int | Precision | None,
    may_be_alone: bool = False,
    parallel: Any = None,
) -> Resources:
    """Check and resolve the arguments of a Trainer or a Fabric.

    With ``may_be_alone``, one device may be requested where more ranks are running: rank 0 uses it.

    Raises:
        UnknownNameError: accelerator, strategy or precision is not known.
        ConfigurationError: a number does not fit the machine, the launcher or the strategy.
    """
    device_type, degrees = device_type_of(accelerator, devices), resolve_degrees(parallel)
    resolved_precision = resolve_precision(precision)
    if not is_count(num_nodes, 1):
        raise ConfigurationError(f"num_nodes={num_nodes!r} must be a whole number of at least 1.")
    place = placement(num_nodes)
    count, indices = _devices(devices, device_type, place)
    launched = place if may_be_alone and devices != "auto" and _leaves_ranks(count * num_nodes, place) else None
    if launched is not None:
        if place.rank == 0:
            place = replace(place, size=1, local_size=1, num_nodes=1)
    elif devices != "auto":
        check_devices(count, place, num_nodes)
    elif place.launcher is not None or place.size > 1:
        num_nodes = place.num_nodes
    if num_nodes > 1 and place.launcher is None:
        raise ConfigurationError(
            f"num_nodes={num_nodes} needs a launcher on every node: start the script with phalanx launch --nodes, "
            "with torchrun --nnodes, or under SLURM with srun."
        )
    resolved_strategy = _strategy(strategy, count * num_nodes, degrees)
    check_backend(device_type, count * num_nodes)
    resolved_strategy.check(count * num_nodes, device_type, num_nodes, resolved_precision)
    return Resources(
        device_type,
        count,
        indices,
        num_nodes,
        resolved_strategy,
        resolved_precision,
        place,
        strategy == "auto" and len(candidates(count * num_nodes, degrees)) > 1,
        resolved_strategy.degrees,
        launched,
    )


def _leaves_ranks(requested: int, place: Placement) -> bool:
    """Whether one device is requested while more ranks are running, and were used by another Trainer.

    phalanx starts ranks for a Trainer only. Ranks of another launcher may have been started for this Trainer, whose
    ``devices`` is then a mistake, unless they have formed a process group before.
    """
    return requested == 1 < place.size and (place.launcher == "phalanx" or is_initialized())


def device_type_of(accelerator: str, devices: int | str | list[int] = "auto") -> str:
    """Return the type of the devices of an accelerator: ``"cpu"``, ``"cuda"``, ``"xpu"``, ``"mps"`` or another.

    With ``"auto"`` it is the CPU where several ranks are requested, and torch has no collectives for the accelerator.

    Raises:
        UnknownNameError: the accelerator is not known.
        ConfigurationError: torch sees no such device.
    """
    if accelerator == "cpu":
        return "cpu"
    found = accelerator_type()
    if accelerator == "auto":
        several = isinstance(devices, int) and devices > 1
        return "cpu" if found is None or (several and not has_backend(found)) else found
    if accelerator == found or (accelerator == "gpu" and found is not None):
        return found
    if accelerator in _ACCELERATORS or accelerator in _LOADED_BY_BACKENDS:
        what = "accelerator" if accelerator == "gpu" else f"{shown_type(accelerator)} device"
        build = " its backend" if accelerator in _LOADED_BY_BACKENDS else f" a build of torch for {_MAKER[accelerator]}"
        other = "" if found is None else f"{found!r} or "
        raise ConfigurationError(
            f"accelerator={accelerator!r} but torch sees no {what}: use {other}'cpu', or install{build}."
        )
    if str(accelerator).lower() in _NO_DEVICES:
        raise UnknownNameError(
            f"accelerator={accelerator!r} is not known: phalanx trains on CPUs and on devices of torch.accelerator; "
            f"use one of {', '.join(_ACCELERATORS)}."
        )
    raise unknown("accelerator", str(accelerator), _ACCELERATORS)


def _devices(devices: int | str | list[int], device_type: str, place: Placement) -> tuple[int, list[int] | None]:
    """Return the number of ranks on each node, and the CUDA indices of their devices if they were listed."""
    available = num_devices(device_type)
    if devices in ("auto", "-1", -1):
        # A launcher determines the number of ranks, regardless of the devices of the machine.
        launched = place.launcher is not None or place.size > 1
        several = available > 1 and has_backend(device_type)
        return place.local_size if launched else available if several else 1, None
    if isinstance(devices, list):
        _check_indices(devices, device_type, available)
        return len(devices), devices
    count = int(devices) if isinstance(devices, str) and devices.strip().isdigit() else devices
    if isinstance(count, str) or not is_count(count, 1):
        raise ConfigurationError(
            f"devices={devices!r} must be 'auto', a number of at least 1, or a list of the indices of devices."
        )
    if device_type != "cpu" and count > available and not is_assigned_one_device(place, available):
        raise ConfigurationError(f"devices={count} but torch sees {available} {shown_type(device_type)} device(s).")
    return count, None


def _check_indices(indices: list[int], device_type: str, available: int) -> None:
    if device_type == "cpu":
        raise ConfigurationError(f"devices={indices!r} lists devices, but the accelerator is {device_type!r}.")
    if not indices or len(set(indices)) != len(indices) or not all(0 <= index < available for index in indices):
        raise ConfigurationError(f"devices={indices!r} must list different indices from 0 to {available - 1}.")


def _strategy(strategy: str | Strategy, world_size: int, degrees: Degrees) -> Strategy:
    if isinstance(strategy, Strategy):
        return strategy.with_degrees(degrees) if degrees.given else strategy
    if not isinstance(strategy, str):
        hint = f" Make an object of it: {strategy.__name__}(...)." if isinstance(strategy, type) else ""
        raise ConfigurationError(f"strategy={strategy!r} must be a name or a Strategy object.{hint}")
    if strategy == "auto":
        # Before the memory is known. With degrees it is the one that needs the least.
        strategy = candidates(world_size, degrees)[-1 if degrees.used else 0]
    built: Strategy = STRATEGIES.load(strategy)()
    return built.with_degrees(degrees) if degrees.given else built


def candidates(world_size: int, degrees: Degrees) -> tuple[str, ...]:
    """Return the strategies that ``strategy="auto"`` tries, the fastest first; only one where the degrees decide.

    Degrees decide if they say how the ranks that are left share the state, or name an axis of one strategy alone.
    """
    found: tuple[str, ...] = automatic("candidates")(world_size, degrees)
    return found
