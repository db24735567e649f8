"""The bytes that each rank holds under a strategy: formulas over a model's size, and nothing else.

After Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 3: with
mixed precision (Micikevicius et al. 2018) and Adam, an element of the model takes 2 bytes as a parameter, 2 as a
gradient and K = 12 as optimizer state, of which 4 are the copy in fp32 that updates are applied to and 8 the two
moments. On W ranks, stage 1 divides K by W, stage 2 the gradients too, stage 3 also the parameters.

What is held here differs from the paper where phalanx, or DeepSpeed, chooses otherwise:

    single, ddp, fsdp   mixed precision keeps parameters, and so gradients and moments, in fp32 and casts them for
                        computing: 4 + 4 + 8. There is no second copy.
    zero*               gradients gather in fp32 whatever the parameters' dtype: 4 in place of 2 (stage 1 has them
                        beside the whole 2 of the backward pass). The copy in fp32 exists in 32-true too.
    *-offload, -nvme    on the host a buffer of gradients that the optimizer reads, and one or two to gather in.

All is counted at its fullest, with moments and gradients. Within a window of several micro-batches ``fsdp`` and
``zero1`` keep whole gradients, which are reduced once, at its end; ``accumulates`` says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Literal

from ..core.precision import Precision

Place = Literal["device", "host", "disk"]

_FP32_BYTES = 4
# Buckets of DeepSpeed's engine, in parts of the model, with a least and a greatest number of elements.
_BUCKET = (64, 2**18, 50_000_000)
_LIVE = (8, 2**18, 1_000_000_000)
_SUB_GROUPS = 16
# What its swapper keeps in host memory: buffers of a sub-group's size for optimizer state, and for parameters.
_STATE_BUFFERS = 4
_PARAMETER_BUFFERS = 5


@dataclass(frozen=True)
class ModelSize:
    """What the formulas take of a model; elements, each tied parameter once."""

    trainable: int
    frozen: int = 0
    buffer_bytes: int = 0
    """Of registered buffers, which every rank holds."""
    state_slots: float = 2.0
    """Elements of optimizer state for each trainable element: 2 for Adam, 1 for SGD with momentum, 0 without."""
    state_bytes: int | None = None
    """The optimizer's state in bytes, in the dtype that torch's optimizers give it; None: that of the parameters."""
    largest_block: int = 0
    """Elements of the largest part that ``fsdp`` gathers at once; 0: the whole model."""
    outside_blocks: int = 0
    """Elements that belong to no such part, and are gathered for the whole step."""
    largest_parameter: int = 0

    @property
    def elements(self) -> int:
        """Trainable and frozen ones."""
        return self.trainable + self.frozen


@dataclass(frozen=True)
class Layout:
    """What a strategy splits over ranks, and where it keeps things."""

    splits_parameters: bool = False
    splits_gradients: bool = False
    splits_state: bool = False
    replicates: bool = False
    """Every rank holds all, and buckets of gradients to reduce."""
    engine: bool = False
    """DeepSpeed: updates go to a copy in fp32, and gradients gather in fp32."""
    parameters_on: Place = "device"
    state_on: Place = "device"
    """Of optimizer state and the copy in fp32; gradients gather on the host where it is not the device."""
    within_node: bool = False
    """Split over the ranks of a node and replicated over nodes; on a single node, over half of its ranks."""


LAYOUTS: dict[str, Layout] = {
    "single": Layout(),
    "ddp": Layout(replicates=True),
    "fsdp": Layout(splits_parameters=True, splits_gradients=True, splits_state=True),
    "hsdp": Layout(splits_parameters=True, splits_gradients=True, splits_state=True, within_node=True),
    "zero1": Layout(splits_state=True, engine=True),
    "zero1-offload": Layout(splits_state=True, engine=True, state_on="host"),
    "zero2": Layout(splits_gradients=True, splits_state=True, engine=True),
    "zero2-offload": Layout(splits_gradients=True, splits_state=True, engine=True, state_on="host"),
    "zero3": Layout(splits_parameters=True, splits_gradients=True, splits_state=True, engine=True),
    "zero3-offload": Layout(
        splits_parameters=True, splits_gradients=True, splits_state=True, engine=True,
        parameters_on="host", state_on="host",
    ),
    "zero3-nvme": Layout(
        splits_parameters=True, splits_gradients=True, splits_state=True, engine=True,
        parameters_on="disk", state_on="disk",
    ),
}  # fmt: skip
"""By the name of the strategy."""


@dataclass(frozen=True)
class Bytes:
    """What one rank holds in one place."""

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    master_copies: int = 0
    """The copies in fp32 that updates are applied to, where parameters are not those themselves."""
    buckets: int = 0
    """What communication and casting need: reduction buckets, parts gathered for computing, swap buffers."""
    activations: int = 0
    """What the forward pass keeps for the backward one."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)

    @property
    def held(self) -> int:
        """All but what comes and goes within a step."""
        return self.parameters + self.gradients + self.optimizer_state + self.master_copies

    def __iter__(self) -> Iterator[int]:
        return (getattr(self, each.name) for each in fields(self))

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Footprint:
    """What one rank holds on its device, in host memory and on disk."""

    device: Bytes = field(default_factory=Bytes)
    host: Bytes = field(default_factory=Bytes)
    disk: Bytes = field(default_factory=Bytes)

    @property
    def everywhere(self) -> Bytes:
        """The sum over all places."""
        return self.device + self.host + self.disk


@dataclass(frozen=True)
class Ranks:
    """How many ranks there are, and how many of them on a node."""

    world_size: int = 1
    local_size: int | None = None


def footprint(
    layout: Layout,
    size: ModelSize,
    ranks: Ranks,
    precision: Precision,
    activations: int = 0,
    casts: int = 0,
    accumulates: bool = False,
) -> Footprint:
    """Return what a rank holds under a strategy.

    Args:
        accumulates: whether windows have several micro-batches.
        activations: bytes that a micro-batch's forward keeps for its backward.
        casts: bytes of copies that autocast makes of parameters, where they are stored in another dtype.
    """
    if layout.engine:
        held = _engine(layout, size, ranks, precision, accumulates)
    else:
        held = _torch(layout, size, ranks, precision, casts, accumulates)
    return Footprint(held.device + Bytes(activations=activations), held.host, held.disk)


def shard_of(layout: Layout, ranks: Ranks) -> int:
    """Return over how many ranks a strategy splits what it splits."""
    if not layout.within_node:
        return ranks.world_size
    nodes = _part(ranks.world_size, ranks.local_size or ranks.world_size)
    return max(1, ranks.world_size // (nodes if nodes > 1 else 2))


def _torch(
    layout: Layout, size: ModelSize, ranks: Ranks, precision: Precision, casts: int, accumulates: bool
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
        buckets = casts + (gradients if layout.replicates and ranks.world_size > 1 else 0)
    return Footprint(
        Bytes(
            parameters=_part(size.elements * width, split if layout.splits_parameters else 1) + size.buffer_bytes,
            gradients=_part(gradients, split if layout.splits_gradients and not accumulates else 1),
            optimizer_state=_part(state, split if layout.splits_state else 1),
            buckets=buckets,
        )
    )


def _engine(layout: Layout, size: ModelSize, ranks: Ranks, precision: Precision, accumulates: bool) -> Footprint:
    width, split = precision.compute_dtype.itemsize, shard_of(layout, ranks)
    share = _part(size.trainable, split)
    whole, parts, staged = _engine_gradients(layout, width, accumulates)
    parameters = _part(size.elements * width, split if layout.splits_parameters else 1)
    places: dict[Place, Bytes] = {"device": Bytes(), "host": Bytes(), "disk": Bytes()}
    places[layout.parameters_on] += Bytes(parameters=parameters)
    places[layout.state_on] += Bytes(
        optimizer_state=_part(round(size.trainable * size.state_slots) * _FP32_BYTES, split),
        master_copies=share * _FP32_BYTES,
    )
    places["device"] += Bytes(
        parameters=size.buffer_bytes,
        gradients=size.trainable * whole,
        buckets=_engine_buckets(layout, size, width),
    )
    gathers_on: Place = "device" if layout.state_on == "device" else "host"
    places[gathers_on] += Bytes(gradients=share * (parts * _FP32_BYTES + staged))
    if layout.state_on == "disk":
        # Gradients gather in host memory, and go to the disk for the update.
        places["disk"] += Bytes(gradients=share * _FP32_BYTES)
        places["host"] += Bytes(buckets=_swap_buffers(size, split, width))
    return Footprint(places["device"], places["host"], places["disk"])


def _engine_gradients(layout: Layout, width: int, accumulates: bool) -> tuple[int, int, int]:
    """Return how DeepSpeed holds the gradient of an element.

    Returns:
        The bytes of whole gradients on the device, of a part in fp32 how many buffers there are beside the state, and
        the bytes of one more in which a part is brought to the host in the parameters' dtype.
    """
    offloads, mixed = layout.state_on != "device", width != _FP32_BYTES
    if layout.splits_parameters:
        return 0, 2 if layout.state_on == "host" else 1, 0
    staged = width if offloads else 0
    if layout.splits_gradients:
        # Mixed precision adds up in a buffer of its own, fp32 only where there is something to add.
        return 0, 2 if offloads and (mixed or accumulates) else 1, staged
    if not mixed:
        # Parts alone, where a window is one micro-batch: whole gradients are let go of as they are reduced.
        return _FP32_BYTES if accumulates else 0, 1 if offloads or not accumulates else 0, staged
    return _FP32_BYTES + (0 if offloads else width), 1 if offloads else 0, staged


def _engine_buckets(layout: Layout, size: ModelSize, width: int) -> int:
    """Return the bytes of what is reduced, and of what is gathered, at once."""
    bucket = _between(size.elements, *_BUCKET)
    if not layout.splits_parameters:
        # Offloading brings gradients over one by one, through two buffers of the largest one's size.
        return (bucket + (2 * size.largest_parameter if layout.state_on != "device" else 0)) * width
    return (2 * bucket + max(_between(size.elements, *_LIVE), size.largest_parameter)) * width


def _swap_buffers(size: ModelSize, split: int, width: int) -> int:
    """Return the bytes in host memory through which state goes to a disk and back."""
    parameter = _part(size.largest_parameter or size.elements, split)
    # A sub-group is closed by the parameter that fills it.
    sub_group = _between(size.elements, _SUB_GROUPS * split, 2**18, 1_000_000_000) + parameter
    sub_group = min(sub_group, _part(size.trainable, split))
    for_state = (_STATE_BUFFERS * _FP32_BYTES + 2 * width) * sub_group
    return for_state + _PARAMETER_BUFFERS * parameter * width


def _between(elements: int, parts: int, low: int, high: int) -> int:
    return min(max(elements // parts, low), high, elements)


def _gathered(size: ModelSize, width: int) -> int:
    """Return the bytes of what is whole at once: what belongs to no block, a block, and the next one under way."""
    blocks = 2 * size.largest_block if size.largest_block else size.elements
    return min(size.outside_blocks + blocks, size.elements) * width


def _largest(size: ModelSize) -> int:
    return max(size.largest_block, size.outside_blocks) or size.elements


def _part(number: int, parts: int) -> int:
    return -(-number // parts)
