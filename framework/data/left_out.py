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

    def touches(self, batch: int, count: int) -> bool:
        """Whether the window of ``count`` global micro-batches after ``batch`` has items that are left out.

        It may have others too: on another number of ranks, windows begin at other items.
        """
        first, stop = (items_after(each, self._first, self._span, self._total) for each in (batch, batch + count))
        return any(span.first < stop and first < span.end for span in self._spans)
