"""The stateful object of a loader: the loader itself or its dataset, if its state resumes it exactly."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

# Hugging Face's ``datasets`` saves the position behind the samples of this stage's buffer, but not the samples.
_LOSSY_STAGE = "BufferShuffledExamplesIterable"
# The samples that all ranks have consumed, under which MosaicML streaming and litdata divide the rest over any ranks.
_POSITION_OF_ALL_RANKS = "sample_in_epoch"


def stateful_part(loader: Any) -> Any:
    """Return the stateful object of a loader: itself, or its dataset if that is read in this process.

    None if there is none, or if its state does not hold all samples that it has read and not yielded: the consumed
    batches are then read again.
    """
    if is_stateful(loader):
        return None if _drops_buffered_samples(getattr(loader, "dataset", None)) else loader
    if isinstance(loader, DataLoader) and loader.num_workers == 0 and has_exact_state(loader.dataset):
        return loader.dataset
    return None


def has_exact_state(dataset: Any) -> bool:
    """Whether a dataset resumes at the same sample from its ``state_dict``."""
    return is_stateful(dataset) and not _drops_buffered_samples(dataset)


def counts_over_ranks(saved: Any) -> bool:
    """Whether a saved state of a loader holds its position in samples of all ranks, as that of MosaicML streaming and
    litdata: any number of ranks continues from it."""
    state = saved.get("state") if isinstance(saved, dict) else None
    if not isinstance(state, dict):
        return False
    dataset = state.get("dataset", state)
    return isinstance(dataset, dict) and _POSITION_OF_ALL_RANKS in dataset


def is_stateful(thing: Any) -> bool:
    """Whether ``thing`` has ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def _drops_buffered_samples(dataset: Any) -> bool:
    """Whether a streaming dataset of Hugging Face has a shuffle buffer, at any depth."""
    stages = [getattr(dataset, "_ex_iterable", None)]
    while stages:
        stage = stages.pop()
        if type(stage).__name__ == _LOSSY_STAGE:
            return True
        if stage is not None:
            stages += [getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", ())]
    return False
