"""``LeftOut``: answers which windows of an epoch a run leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.data_spans import Span
from ..core.errors import DataError
from .training_source import items_after


class LeftOut:
    """Answers whether a window of the epoch in progress is left out.

    Args:
        spans: what the run leaves out.
        epoch: the epoch.
        layout: that of the source, which has started the epoch.

    Raises:
        DataError: the spans count other items than the source does.
    """

    def __init__(self, spans: Sequence[Span], epoch: int, layout: dict[str, Any]) -> None:
        self._spans = [span for span in spans if span.epoch == epoch]
        self._first, self._span, self._total = layout["first"], layout["span"], layout["total"]
        for span in self._spans:
            if span.unit != layout["unit"]:
                raise DataError(
                    f"the run leaves out {span}, but the loader given now counts {layout['unit']}: a run must resume "
                    "with the kind of loader that it was started with."
                )

    def __bool__(self) -> bool:
        return bool(self._spans)

    def __contains__(self, batch: int) -> bool:
        """Whether the window that begins after ``batch`` global micro-batches of the epoch is left out."""
        item = items_after(batch, self._first, self._span, self._total)
        return any(span.first <= item < span.end for span in self._spans)
