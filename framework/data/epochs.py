"""The number of the epoch, passed to everything in a loader that depends on it."""

from __future__ import annotations

from typing import Any

from .orders import samplers_of


def pass_epoch_to(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` on the loader, its dataset and its samplers, if they have that method.

    The stages of a pipeline, as WebDataset has them, count their epochs themselves: their counters are set.
    """
    batch_sampler, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    informed: list[Any] = []
    for each in (*_datasets_of(loader), *samplers_of(batch_sampler), *samplers_of(sampler)):
        set_epoch = getattr(each, "set_epoch", None)
        if callable(set_epoch) and not any(each is known for known in informed):
            informed.append(each)
            set_epoch(epoch)
        for stage in _stages_of(each):
            if type(getattr(stage, "epoch", None)) is int and not hasattr(stage, "set_epoch"):
                # No ordinary way: a stage of WebDataset has no method that sets its counter, which it increments at
                # the start of each pass.
                vars(stage)["epoch"] = epoch - 1


def _datasets_of(loader: Any) -> list[Any]:
    """Return a loader, its dataset, and the loaders and datasets that are stages of their pipelines."""
    found = [loader, getattr(loader, "dataset", None)]
    for each in found:
        # The list grows while it is iterated over: a stage may be a loader itself.
        found += [part for stage in _stages_of(each) for part in (stage, getattr(stage, "dataset", None))]
    return found


def _stages_of(dataset: Any) -> list[Any]:
    stages = getattr(dataset, "pipeline", None)
    return stages if isinstance(stages, list) else []
