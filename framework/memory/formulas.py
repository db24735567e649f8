"""Formulas for the bytes that each rank holds under a strategy, given a model's size.

After Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 3: with
mixed precision (Micikevicius et al. 2018) and Adam, an element of the model takes 2 bytes as a parameter, 2 as a
gradient and K = 12 as optimizer state, of which 4 are the fp32 master copy that updates are applied to and 8 the two
moments. On W ranks, stage 1 divides K by W, stage 2 also the gradients, stage 3 also the parameters.

phalanx and DeepSpeed differ from the paper as follows:

    single, ddp, fsdp   mixed precision keeps parameters, and so gradients and moments, in fp32 and casts them for
                        computing: 4 + 4 + 8. There is no master copy.
    zero*               gradients are accumulated in fp32 for any dtype of parameters: 4 in place of 2 (stage 1 has
                        them besides the full 2 of the backward pass). There is a master copy in 32-true too.
    *-offload, -nvme    on the host a buffer of gradients that the optimizer reads, and one or two to accumulate in.

The result is the peak within a step, with moments and gradients. In windows of several micro-batches (``accumulates``)
``fsdp`` and ``zero1`` hold full gradients, which they reduce once, at the end of the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from ..core.degrees import Degrees
from ..core.precision import Precision
from ..parallel.strategy import MemoryLayout, Place

_FP32_BYTES = 4
# Buckets of DeepSpeed's engine, as strategies/deepspeed/config.py sets them: the model divided by the first number, but
# at least and at most so many elements.
_BUCKET = (64, 2**18, 50_000_000)
_LIVE = (8, 2**18, 1_000_000_000)
_SUB_GROUPS = 16
# Buffers of DeepSpeed's swapper in host memory: of a sub-group's size for optimizer state, and for parameters.
_STATE_BUFFERS = 4
_PARAMETER_BUFFERS = 5


@dataclass(frozen=True)
class Ranks:
    """The number of ranks, how many of them are on a node (None: all), and the degrees that were given."""

    world_size: int = 1
    local_size: int | None = None
    degrees: Degrees = field(default_factory=Degrees)

    @property
    def replicas(self) -> int:
        """The ranks over which replicas average gradients, without a split of their state."""
        laid_out = self.degrees.lay_out(self.world_size)
        return self.world_size // laid_out.tp // laid_out.pp


@dataclass(frozen=True)
class ModelSize:
    """Size of a model, in elements unless stated otherwise. A tied parameter counts once."""

    trainable: int
    frozen: int = 0
    buffer_bytes: int = 0
    """Bytes of registered buffers, of which every rank has a copy."""
    state_slots: float = 2.0
    """Elements of optimizer state for each trainable element: 2 for Adam, 1 for SGD with momentum, 0 without."""
    state_bytes: int | None = None
    """Bytes of optimizer state under torch's optimizers; None: ``state_slots`` in the parameters' dtype."""
    update_bytes: int = 0
    """Bytes of temporary memory of an update by torch's optimizers."""
    largest_block: int = 0
    """Elements of the largest block that ``fsdp`` gathers at once; 0: the entire model."""
    outside_blocks: int = 0
    """Elements outside all blocks, which stay gathered throughout a step."""
    largest_parameter: int = 0

    @property
    def elements(self) -> int:
        """Elements of all parameters, trainable and frozen."""
        return self.trainable + self.frozen

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint: parameters and optimizer state in fp32."""
        return _FP32_BYTES * (self.elements + round(self.trainable * self.state_slots))


@dataclass(frozen=True)
class Bytes:
    """Bytes that one rank holds in one place."""

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    master_copies: int = 0
    """fp32 copies of parameters that updates are applied to, where these are not the parameters themselves."""
    buckets: int = 0
    """Buffers for communication, casting and updates: reduction buckets, gathered blocks, swap buffers."""
    activations: int = 0
    """Tensors that the forward pass saves for the backward pass."""

    @property
    def total(self) -> int:
        """The sum of all fields."""
        return sum(self)

    @property
    def held(self) -> int:
        """The sum without buffers and activations, which exist only within a step."""
        return self.parameters + self.gradients + self.optimizer_state + self.master_copies

    def __iter__(self) -> Iterator[int]:
        return (getattr(self, each.name) for each in fields(self))

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Footprint:
    """Bytes that one rank holds on its device, in host memory and on disk."""

    device: Bytes = field(default_factory=Bytes)
    host: Bytes = field(default_factory=Bytes)
    disk: Bytes = field(default_factory=Bytes)

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(self.device + other.device, self.host + other.host, self.disk + other.disk)

    @property
    def everywhere(self) -> Bytes:
        """The sum over all places."""
        return self.device + self.host + self.disk


def footprint(
    layout: MemoryLayout,
    size: ModelSize,
    ranks: Ranks,
    precision: Precision,
    activations: int = 0,
    casts: int = 0,
    accumulates: bool = False,
) -> Footprint:
    """Return the bytes that a rank holds under a strategy.

    Args:
        activations: bytes that the forward pass of a micro-batch saves for its backward pass.
        casts: bytes of the copies of parameters that autocast makes, where parameters are stored in another dtype.
        accumulates: whether windows have several micro-batches.
    """
    if layout.engine:
        held = _engine(layout, size, ranks, precision, accumulates)
    else:
        held = _torch(layout, size, ranks, precision, casts, accumulates)
        # Updates take the memory that activations have left, and only what they need beyond it is added.
        update = _part(size.update_bytes, shard_of(layout, ranks) if layout.splits_state else 1)
        held += Footprint(Bytes(buckets=max(0, update - activations)))
    return Footprint(held.device + Bytes(activations=activations), held.host, held.disk)


def shard_of(layout: MemoryLayout, ranks: Ranks) -> int:
    """Return the number of ranks over which a strategy splits."""
    if ranks.degrees.given and not (layout.within_node and ranks.degrees.dp_replicate is None):
        laid_out = ranks.degrees.lay_out(ranks.world_size)
        return laid_out.dp_shard * laid_out.cp
    if not layout.within_node:
        return ranks.world_size
    nodes = _part(ranks.world_size, ranks.local_size or ranks.world_size)
    return max(1, ranks.world_size // (nodes if nodes > 1 else 2))


def _torch(
    layout: MemoryLayout, size: ModelSize, ranks: Ranks, precision: Precision, casts: int, accumulates: bool
) -> Footprint:
    width = precision.parameter_dtype.itemsize
    split = shard_of(layout, ranks)
    gradients = size.trainable * width
    state = size.state_bytes if size.state_bytes is not None else round(size.trainable * size.state_slots * width)
    if layout.splits_parameters:
        buckets = (
            _gathered(size, precision.compute_dtype.itemsize) + _largest(size) * precision.reduction_dtype.itemsize
        )
    else:
        buckets = casts + (gradients if layout.replicates and ranks.replicas > 1 else 0)
    return Footprint(
        Bytes(
            parameters=_part(size.elements * width, split if layout.splits_parameters else 1) + size.buffer_bytes,
            gradients=_part(gradients, split if layout.splits_gradients and not accumulates else 1),
            optimizer_state=_part(state, split if layout.splits_state else 1),
            buckets=buckets,
        )
    )


def _engine(layout: MemoryLayout, size: ModelSize, ranks: Ranks, precision: Precision, accumulates: bool) -> Footprint:
    width, split = precision.compute_dtype.itemsize, shard_of(layout, ranks)
    share = _part(size.trainable, split)
    full, buffers, staged = _engine_gradients(layout, width, accumulates)
    parameters = _part(size.elements * width, split if layout.splits_parameters else 1)
    places: dict[Place, Bytes] = {"device": Bytes(), "host": Bytes(), "disk": Bytes()}
    places[layout.parameters_on] += Bytes(parameters=parameters)
    places[layout.state_on] += Bytes(
        optimizer_state=_part(round(size.trainable * size.state_slots) * _FP32_BYTES, split),
        master_copies=share * _FP32_BYTES,
    )
    places["device"] += Bytes(
        parameters=size.buffer_bytes,
        gradients=size.trainable * full,
        buckets=_engine_buckets(layout, size, width),
    )
    accumulated_on: Place = "device" if layout.state_on == "device" else "host"
    places[accumulated_on] += Bytes(gradients=share * (buffers * _FP32_BYTES + staged))
    if layout.state_on == "disk":
        # Gradients are accumulated in host memory, and written to the disk for the update.
        places["disk"] += Bytes(gradients=share * _FP32_BYTES)
        places["host"] += Bytes(buckets=_swap_buffers(size, split, width))
    return Footprint(places["device"], places["host"], places["disk"])


def _engine_gradients(layout: MemoryLayout, width: int, accumulates: bool) -> tuple[int, int, int]:
    """Return how DeepSpeed holds the gradient of an element.

    Returns:
        Three numbers: the bytes of the full gradient on the device; the number of fp32 buffers for this rank's part of
        it, next to the optimizer's state; and the bytes of a staging buffer in which that part is copied to the host in
        the parameters' dtype.
    """
    offloads, mixed = layout.state_on != "device", width != _FP32_BYTES
    if layout.splits_parameters:
        return 0, 2 if layout.state_on == "host" else 1, 0
    staged = width if offloads else 0
    if layout.splits_gradients:
        # Mixed precision accumulates in a buffer of its own; fp32 needs one only in windows of several micro-batches.
        return 0, 2 if offloads and (mixed or accumulates) else 1, staged
    if not mixed:
        # With one micro-batch in a window full gradients are freed as they are reduced.
        return _FP32_BYTES if accumulates else 0, 1 if offloads or not accumulates else 0, staged
    return _FP32_BYTES + (0 if offloads else width), 1 if offloads else 0, staged


def _engine_buckets(layout: MemoryLayout, size: ModelSize, width: int) -> int:
    """Return the bytes that are reduced and gathered at once."""
    bucket = _between(size.elements, *_BUCKET)
    if not layout.splits_parameters:
        # Offloading copies gradients one by one, through two buffers of the size of the largest.
        return (bucket + (2 * size.largest_parameter if layout.state_on != "device" else 0)) * width
    return (2 * bucket + max(_between(size.elements, *_LIVE), size.largest_parameter)) * width


def _swap_buffers(size: ModelSize, split: int, width: int) -> int:
    """Return the bytes of the buffers in host memory between memory and a disk."""
    parameter = _part(size.largest_parameter or size.elements, split)
    # DeepSpeed closes a sub-group after the parameter that fills it, so it may be larger by one parameter.
    sub_group = _between(size.elements, _SUB_GROUPS * split, 2**18, 1_000_000_000) + parameter
    sub_group = min(sub_group, _part(size.trainable, split))
    for_state = (_STATE_BUFFERS * _FP32_BYTES + 2 * width) * sub_group
    return for_state + _PARAMETER_BUFFERS * parameter * width


def _between(elements: int, parts: int, low: int, high: int) -> int:
    return min(max(elements // parts, low), high, elements)


def _gathered(size: ModelSize, width: int) -> int:
    """Return the bytes that are gathered at once: outside all blocks, one block, and the next one, prefetched."""
    blocks = 2 * size.largest_block if size.largest_block else size.elements
    return min(size.outside_blocks + blocks, size.elements) * width


def _largest(size: ModelSize) -> int:
    return max(size.largest_block, size.outside_blocks) or size.elements


def _part(number: int, parts: int) -> int:
    return -(-number // parts)
