"""Degrees of parallelism: how many ranks each axis of a mesh has.

    dp_replicate   replicas of the model, each of which reads data of its own
    dp_shard       ranks that share the parameters, gradients and optimizer state of a replica, and read different data
    cp             ranks that share the sequences of a batch (context parallelism)
    tp             ranks that share the computation of a layer (tensor parallelism)
    pp             ranks that each hold some of the layers (pipeline parallelism)
    ep             ranks that each hold some of the experts; they are among those of ``dp_shard``

Ranks next to one another differ first in ``tp``, then in ``cp``, ``pp``, ``dp_shard`` and ``dp_replicate``. Those that
differ in ``tp``, ``cp`` or ``pp`` alone read the same data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from .errors import ConfigurationError, closest_or_known, is_count
from .wording import a_type, counted

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
# The axes whose degrees multiply to the number of ranks.
_FACTORS = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
_MOST_NUMBERS = 12
# Names that other frameworks and papers use for the axes.
_OTHER_NAMES = {
    **dict.fromkeys(
        ("dp", "ddp", "replicate", "replicas", "data", "data_parallel", "data_parallel_size"), "dp_replicate"
    ),
    **dict.fromkeys(("fsdp", "shard", "zero", "hsdp"), "dp_shard"),
    **dict.fromkeys(("sp", "context", "sequence", "context_parallel", "sequence_parallel", "ulysses"), "cp"),
    **dict.fromkeys(("tensor", "tensor_parallel", "tensor_parallel_size", "model", "mp"), "tp"),
    **dict.fromkeys(("pipeline", "pipeline_parallel", "pipe"), "pp"),
    **dict.fromkeys(("expert", "experts", "expert_parallel", "moe"), "ep"),
}


@dataclass(frozen=True)
class Layout:
    """The number of ranks along each axis; the product of all but ``ep`` is the number of ranks."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        used = [f"{each.name}={size}" for each in fields(self) if (size := getattr(self, each.name)) > 1]
        return " x ".join(used) or "1 rank"

    @property
    def copies(self) -> int:
        """The number of ranks that read the same data; they are next to one another."""
        return self.cp * self.tp * self.pp

    def place_of(self, rank: int) -> tuple[int, int, int]:
        """Return the places of a rank along ``tp``, ``cp`` and ``pp``, in which ranks next to one another differ."""
        layer, rest = rank % self.tp, rank // self.tp
        return layer, rest % self.cp, rest // self.cp % self.pp

    @property
    def data_size(self) -> int:
        """The number of shards of the data."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.data_size * self.copies


@dataclass(frozen=True)
class Degrees:
    """Degrees as they were given; -1 takes the ranks that the others leave, None is not given."""

    dp_replicate: int | None = None
    dp_shard: int | None = None
    cp: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None

    @property
    def given(self) -> dict[str, int]:
        """The degrees that were given, by axis."""
        held = {each.name: getattr(self, each.name) for each in fields(self)}
        return {axis: degree for axis, degree in held.items() if degree is not None}

    @property
    def used(self) -> tuple[str, ...]:
        """The axes that may have more than one rank, as far as they were given."""
        return tuple(axis for axis, degree in self.given.items() if degree != 1)

    def __str__(self) -> str:
        return f"parallel={self.given!r}"

    def joined(self, other: Degrees, source: str) -> Degrees:
        """Return these degrees and those of ``source``.

        Raises:
            ConfigurationError: the two contradict one another.
        """
        for axis, degree in self.given.items():
            if other.given.get(axis, degree) != degree:
                raise ConfigurationError(
                    f"{self} and {source} contradict one another: {axis} is {degree} in the first and "
                    f"{other.given[axis]} in the second. Leave one of them out."
                )
        return Degrees(**{**other.given, **self.given})

    def lay_out(self, world_size: int, rest: str | None = None) -> Layout:
        """Return the layout of a number of ranks.

        Args:
            world_size: the number of ranks.
            rest: the axis that takes the ranks that the degrees leave, if no degree is -1 and it is not given; None:
                ``dp_shard``, or ``dp_replicate`` if the former is given.

        Raises:
            ConfigurationError: the degrees do not divide the ranks, or leave some over.
        """
        degrees = dict(self.given)
        rest = rest or ("dp_replicate" if self.dp_shard else "dp_shard")
        free = next((axis for axis, degree in degrees.items() if degree == -1), None)
        if free is None and degrees.get(rest) is None:
            free = rest
        fixed = {axis: degrees.get(axis, 1) for axis in _FACTORS if axis != free}
        product = prod(fixed.values())
        if world_size % product or (free is None and world_size != product):
            raise self._misfit(world_size, fixed, free)
        if free is not None:
            fixed[free] = world_size // product
        ep = degrees.get("ep", 1)
        if fixed["dp_shard"] * fixed["cp"] % ep:
            raise ConfigurationError(
                f"{self} with {counted(world_size, 'rank')}: groups of ep={ep} do not divide the "
                f"{fixed['dp_shard'] * fixed['cp']} ranks of dp_shard and cp. Use ep out of "
                f"{divisors(fixed['dp_shard'] * fixed['cp'])}."
            )
        return Layout(**fixed, ep=ep)

    def _misfit(self, world_size: int, fixed: Mapping[str, int], free: str | None) -> ConfigurationError:
        """Return the error for degrees that do not fit a number of ranks, with the numbers that would."""
        used = {axis: degree for axis, degree in fixed.items() if degree != 1}
        product = " x ".join(f"{axis}={degree}" for axis, degree in used.items())
        what = f"{self} with {counted(world_size, 'rank')}: {product} " if used else f"{self} with {world_size} ranks: "
        ways = []
        for axis in self.given:
            if axis in fixed and (others := prod(fixed.values()) // fixed[axis]) and world_size % others == 0:
                left = world_size // others
                ways.append(f"{axis} out of {divisors(left)}" if free is not None else f"{axis}={left}")
        size = prod(fixed.values())
        if free is None:
            what += f"takes {counted(size, 'rank')}"
            ways.append(f"{size} ranks")
        else:
            what += f"takes groups of {counted(size, 'rank')}, which do not divide them"
            near = sorted({max(1, world_size // size) * size, (world_size // size + 1) * size})
            ways.append(f"{' or '.join(map(str, near))} ranks")
        return ConfigurationError(f"{what}. Use {', or '.join(ways)}.")


def resolve_degrees(given: Any) -> Degrees:
    """Check degrees of parallelism: a mapping from axes to numbers, a string such as ``"tp=2,cp=2"``, or None.

    Raises:
        ConfigurationError: an axis is not known, or a degree is not a number of ranks.
    """
    if given is None or isinstance(given, Degrees):
        return given or Degrees()
    degrees = _parsed(given) if isinstance(given, str) else given
    if not isinstance(degrees, Mapping):
        raise ConfigurationError(
            f"parallel={given!r} is {a_type(given)}: give a dict of axes and their numbers of ranks, such as "
            "{'tp': 2, 'dp_shard': -1}."
        )
    for axis, degree in degrees.items():
        if axis not in AXES:
            other = _OTHER_NAMES.get(str(axis).lower())
            hint = f" Did you mean {other!r}?" if other else closest_or_known(str(axis), AXES)
            raise ConfigurationError(f"parallel={{{axis!r}: {degree!r}}}: there is no such axis.{hint}")
        if not (is_count(degree, 1) or (degree == -1 and is_count(degree, -1) and axis != "ep")):
            extra = "" if axis == "ep" else ", or -1 for the ranks that the others leave"
            raise ConfigurationError(
                f"parallel={{{axis!r}: {degree!r}}}: a degree is a whole number of at least 1{extra}."
            )
    free = [axis for axis, degree in degrees.items() if degree == -1]
    if len(free) > 1:
        raise ConfigurationError(
            f"parallel={dict(degrees)!r}: {' and '.join(free)} are -1, and only one axis can take the ranks that the "
            "others leave. Give a number for all but one of them."
        )
    return Degrees(**degrees)


def divisors(number: int) -> str:
    """Return the divisors of a number as text, the first dozen of them."""
    found = [each for each in range(1, number + 1) if number % each == 0]
    more = ", ..." if len(found) > _MOST_NUMBERS else ""
    return ", ".join(map(str, found[:_MOST_NUMBERS])) + more


def _parsed(text: str) -> dict[str, int]:
    """Return the degrees in ``"tp=2,cp=2"``; blanks may separate them too."""
    degrees: dict[str, int] = {}
    for item in text.replace(",", " ").split():
        axis, _, number = item.partition("=")
        if not number.lstrip("-").isdigit():
            raise ConfigurationError(
                f"parallel={text!r}: {item!r} is not an axis with its number of ranks: give it as tp=2,dp_shard=-1."
            )
        if axis in degrees:
            raise ConfigurationError(f"parallel={text!r} has {axis} twice: leave one of them out.")
        degrees[axis] = int(number)
    return degrees


def listed(axes: Iterable[str]) -> str:
    """Return axes as text: ``cp, tp and pp``."""
    *first, last = axes
    return f"{', '.join(first)} and {last}" if first else last
