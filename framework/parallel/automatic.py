"""The strategies among which ``strategy="auto"`` chooses."""

from __future__ import annotations

from ..core.degrees import Degrees


def candidates(world_size: int, degrees: Degrees) -> tuple[str, ...]:
    """Return the strategies that ``strategy="auto"`` tries, the fastest first; only one where the degrees decide.

    Degrees decide if they say how the ranks that are left share the state, or name an axis of one strategy alone.
    """
    if not degrees.used:
        return ("single" if world_size == 1 else "ddp", "fsdp", "zero3-offload", "zero3-nvme")
    if "pp" in degrees.used:
        return ("pipeline",)
    if degrees.dp_replicate == -1 or degrees.dp_shard == 1:
        return ("ddp",)
    if degrees.given.keys() & {"dp_shard", "dp_replicate"} or "ep" in degrees.used:
        return ("fsdp",)
    return ("ddp", "fsdp")
