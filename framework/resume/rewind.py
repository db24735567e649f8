"""``go_back``: the checkpoint that a fit with ``nonfinite="rewind"`` returns to, and the data that it leaves out.

Weights may have been on their way to NaN for many steps, so it is not enough to leave out the batch that failed. The
practice of large runs is to return to a checkpoint of before, and to leave out the data in between, at most a few
hundred steps of it (Chowdhery et al., PaLM, 2022, section 5.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint import newest_good, read_manifest
from ..core.data_spans import Span, without
from ..core.errors import NonFiniteError
from ..core.wording import counted
from ..data.accumulation_window import Windows
from ..data.training_source import items_after
from ..distributed.collective_errors import on_rank_zero
from ..report.rewinds import NONFINITE, Rewind, add_rewind, rewinds_of
from .checkpoint_search import not_resumable, only_of

if TYPE_CHECKING:
    from ..checkpoint.manifest import Manifest
    from ..run.run import Run

MOST_WINDOWS = 100
"""Optimizer steps whose data is left out by one rewind, at most."""
MOST_REWINDS = 10
"""Rewinds after which a run gives up."""


def go_back(
    run: Run, windows: Windows, folders: Sequence[Path], error: NonFiniteError, epochs_are_alike: bool
) -> Path | None:
    """Record that the run continues from an earlier checkpoint without the data since; return the checkpoint.

    Collective. None if there is none, or if the run has gone back too often; ``error`` then has a sentence about it.

    Args:
        run: the fit, in the step that failed.
        folders: the directories that it saves into.
        error: what failed.
        epochs_are_alike: whether all epochs have the same data.
    """
    progress, data = run.progress, _Data(windows, epochs_are_alike)
    failed = data.span(progress.epoch, progress.batch_in_epoch, progress.batch_in_epoch + windows.size)

    def choose() -> tuple[Path | None, str]:
        directory, identity = run.directory.path, run.directory.identity
        if sum(each.cause == NONFINITE for each in rewinds_of(directory)) >= MOST_REWINDS:
            return None, f"The run has gone back {MOST_REWINDS} times, so it ends."

        def refused(manifest: Manifest) -> str | None:
            # If the first step fails, the weights are at fault.
            if data.trained(manifest.document, failed.epoch, failed.first):
                return None
            return "the first step after it fails."

        found = newest_good(folders, run.note, only_of(identity, lambda each: not_resumable(each) or refused(each)))
        if found is None:
            return None, "There is no checkpoint to go back to: save more often, as with every_n_train_steps."
        document = read_manifest(found).document
        excluded = data.newest(data.trained(document, failed.epoch, failed.stop))
        step = document["progress"]["global_step"]
        rewind = Rewind(NONFINITE, progress.global_step, step, found.name, excluded, str(error))
        add_rewind(directory, folders, found, rewind)
        return found, (
            f"The run goes back to {found.name}, saved after {counted(step, 'step')}, and leaves out "
            f"{', '.join(map(str, excluded))}: {error}"
        )

    found, text = on_rank_zero(run.world, choose)
    if found is None:
        error.args = (f"{error} {text}",)
        return None
    run.note(text)
    return found


class _Data:
    """The training data of a run, in items of its epochs."""

    def __init__(self, windows: Windows, epochs_are_alike: bool) -> None:
        self._windows = windows
        self._source = windows.source
        layout = self._source.layout()
        self._unit = layout["unit"]
        self._first, self._span, self._total = layout["first"], layout["span"], layout["total"]
        self._per_window = self._span * windows.size
        # The end of the epochs before; None if it is not known.
        end = windows.end if epochs_are_alike else None
        self._end = None if end is None else self._items(end)

    def _items(self, batches: int) -> int:
        return items_after(batches, self._first, self._span, self._total)

    def span(self, epoch: int, first: int, stop: int) -> Span:
        """Return global micro-batches of an epoch as a span of items."""
        return Span(epoch, self._items(first), self._items(stop), self._unit)

    def trained(self, document: dict[str, Any], epoch: int, stop: int | None) -> list[Span]:
        """Return what a run has trained on from a checkpoint to an item of an epoch, in order."""
        progress, unit = document["progress"], self._unit
        at, items = progress["epoch"], 0
        if progress["epoch_ended"]:
            at += 1
        elif progress["batch_in_epoch"]:
            items = self._source.items_before(document["position"])
        spans = [Span(each, items if each == at else 0, self._end, unit) for each in range(at, epoch)]
        spans.append(Span(epoch, items if epoch == at else 0, stop, unit))
        return [part for span in spans for part in without(span, self._windows.excluded_spans)]

    def newest(self, spans: Sequence[Span]) -> list[Span]:
        """Return the end of what was trained on: the items of ``MOST_WINDOWS`` windows; all if that is not known."""
        kept, left = list[Span](), MOST_WINDOWS * self._per_window
        for span in reversed(spans):
            if left <= 0:
                break
            first = span.first if span.stop is None else max(span.first, span.stop - left)
            kept.append(Span(span.epoch, first, span.stop, span.unit))
            left = 0 if span.stop is None else left - (span.stop - first)
        return kept[::-1]
