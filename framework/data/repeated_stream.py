"""A check that a resumed run reads the same stream again, whose consumed batches it drops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def stream_identity(workers: int, first_batch: str | None) -> dict[str, Any]:
    """Return the values by which a later run recognizes the stream of an epoch, as JSON values.

    Args:
        workers: the loader's number of workers.
        first_batch: the fingerprint of the epoch's first batch, or None if unknown.
    """
    # One worker yields the batches in the order of the rank's own process.
    return {"workers": max(workers, 1), "first_batch": first_batch}


def stream_change(name: str, former: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return a message if a stream is not the one that the interrupted run has read, else None."""
    workers, first_batch = former.get("workers", now["workers"]), former.get("first_batch")
    if workers != now["workers"]:
        return (
            f"The interrupted run read {name} with num_workers={workers}, and this one has "
            f"num_workers={now['workers']}. Workers change the order of an iterable dataset, so some samples are "
            "repeated and others are never read: resume with the same number of workers."
        )
    if None not in (first_batch, now["first_batch"]) and first_batch != now["first_batch"]:
        return (
            f"{name} does not yield the batches again that the interrupted run has consumed: the first batch of this "
            "epoch differs. Some samples are repeated and others are never read: give its shuffling a seed. Nothing is "
            "lost if only random augmentation differs."
        )
    return None
