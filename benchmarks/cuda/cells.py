"""The sizes of the model, the sides that train it, and a cell for each side of a size that is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

LEAD = 2
"""Steps before each phase that are not measured: caches of memory are empty, and shapes may have changed."""
# Temporary memory for each token, in bytes: activations of a layer, and logits with their gradients in fp32 and bf16.
_BYTES_OF_LAYER, _BYTES_OF_LOGIT = 34, 14
# Parameters, gradients and Adam's state in fp32, and what a strategy holds besides; CUDA's context and libraries.
_BYTES_OF_PARAMETER, _BYTES_OF_PROCESS = 20, 1.5e9


@dataclass(frozen=True)
class Size:
    """A GPT and its batches, and how long it is measured."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    rows: int
    short: tuple[int, int]
    """Rows and length of batches so small that the host, not the device, limits a step."""
    learning_rate: float
    rounds: int = 3
    steps: int = 20
    """Measured steps of each round."""

    @property
    def tokens(self) -> int:
        """The number of tokens in a batch."""
        return self.rows * self.length

    @property
    def elements(self) -> int:
        """The number of parameters, of which the embedding and the head share theirs."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (self.vocabulary + self.length) * self.width + 2 * self.width

    @property
    def temporary_bytes(self) -> float:
        """An estimate of the memory that a step needs besides the state."""
        # Half as much again for what the allocator cannot use.
        return 1.5 * self.tokens * (_BYTES_OF_LAYER * self.width * self.layers + _BYTES_OF_LOGIT * self.vocabulary)

    @property
    def resident_bytes(self) -> float:
        """An estimate of the device's memory that a process holds between two rounds."""
        return _BYTES_OF_PARAMETER * self.elements + _BYTES_OF_PROCESS


SIZES = {
    "350m": Size(24, 1024, 16, 50304, 2048, 4, (1, 64), 3e-4),
    "1.3b": Size(24, 2048, 16, 50304, 2048, 4, (1, 64), 3e-4),
    "small": Size(2, 128, 4, 512, 64, 1, (1, 64), 3e-3, rounds=7, steps=200),
}
_TINY = Size(2, 32, 2, 128, 32, 2, (1, 16), 3e-3, rounds=2, steps=2)


def size_of(name: str, tiny: bool, quick: bool = False) -> Size:
    """Return a size, or in its place one that a CPU trains at once; ``quick`` measures one short round."""
    size = _TINY if tiny else SIZES[name]
    return replace(size, rounds=1, steps=min(size.steps, 5)) if quick else size


@dataclass(frozen=True)
class Side:
    """A way to train the model.

    Attributes:
        module: the file that contains it, ``side_<module>.py``.
        strategy: the strategy that it uses.
        reference: the side that it is compared with: the same strategy without a framework.
        requires: the libraries that it imports.
        compiles: whether it is measured with ``torch.compile``.
        options: settings of the strategy.
    """

    module: str
    strategy: str
    reference: str
    requires: tuple[str, ...] = ()
    compiles: bool = True
    options: dict[str, Any] = field(default_factory=dict)


_DEEPSPEED = ("deepspeed",)
SIDES = {
    "raw": Side("raw", "single", "raw"),
    "phalanx": Side("phalanx", "single", "raw"),
    "phalanx Fabric": Side("fabric", "single", "raw"),
    "lightning": Side("lightning", "single", "raw", ("lightning",)),
    "accelerate": Side("accelerate", "single", "raw", ("accelerate",)),
    "raw ddp": Side("raw", "ddp", "raw ddp"),
    "phalanx ddp": Side("phalanx", "ddp", "raw ddp"),
    "raw fsdp": Side("raw", "fsdp", "raw fsdp"),
    "phalanx fsdp": Side("phalanx", "fsdp", "raw fsdp"),
    **{
        side: Side(module, f"zero{stage}", f"deepspeed zero{stage}", _DEEPSPEED, compiles=stage < 3)
        for stage in (1, 2, 3)
        for side, module in ((f"deepspeed zero{stage}", "deepspeed"), (f"phalanx zero{stage}", "phalanx"))
    },
}
# Settings of DeepSpeed, each beside the defaults of phalanx.
_OVERLAP = {"zero_optimization": {"overlap_comm": True}}
_BF16 = {"communication_data_type": "bf16"}
SETTINGS = {
    f"phalanx zero{stage}, {title}": Side("phalanx", f"zero{stage}", f"phalanx zero{stage}", _DEEPSPEED, True, options)
    for stage in (2, 3)
    for title, options in (("overlap_comm", _OVERLAP), ("bf16 communication", _BF16))
}
ALL_SIDES = {**SIDES, **SETTINGS}


@dataclass(frozen=True)
class Cell:
    """One side of one size; travels to its process as JSON."""

    side: str
    size: str
    compiled: bool
    device: str
    tiny: bool
    quick: bool
    folder: str
    """For temporary files."""


@dataclass(frozen=True)
class Phase:
    """A part of a fit that is measured as one: ``LEAD`` steps, then ``steps`` measured ones."""

    kind: str
    steps: int

    @property
    def is_short(self) -> bool:
        """Whether its batches are short."""
        return self.kind == "host"


def phases(size: Size, compiled: bool) -> list[Phase]:
    """Return the phases of a fit, in order.

    The profiler is last, as its library slows launches down for the rest of the process. Compiled code has no phase
    with short batches, for which it would have to be generated again.
    """
    found = [Phase("losses", 6), *[Phase("round", size.steps)] * size.rounds, Phase("waits", 5)]
    return [*found, *([] if compiled else [Phase("host", 12)]), Phase("profile", 3)]


def missing(side: Side) -> str:
    """Return the libraries of a side that are not installed, joined by commas."""
    return ", ".join(name for name in side.requires if find_spec(name) is None)


def cohorts(names: Sequence[str], room: int) -> list[list[str]]:
    """Divide sides into groups whose processes share the device.

    Each begins with ``raw``, whose losses the others must have, and contains the references of its members.

    Args:
        names: the sides to be measured.
        room: how many processes the device has memory for; a side, its reference and ``raw`` are together in any case.
    """
    groups: list[list[str]] = []
    for reference in dict.fromkeys(ALL_SIDES[name].reference for name in names):
        always = list(dict.fromkeys(["raw", reference]))
        members = [name for name in names if ALL_SIDES[name].reference == reference and name not in always]
        count = max(room - len(always), 1)
        chunks = [members[start : start + count] for start in range(0, len(members), count)]
        groups += [[*always, *chunk] for chunk in chunks or [[]]]
    merged: list[list[str]] = []
    for group in groups:
        together = list(dict.fromkeys([*merged[-1], *group])) if merged else group
        if merged and len(together) <= room:
            merged[-1] = together
        else:
            merged.append(group)
    return merged
