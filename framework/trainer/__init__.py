"""`Trainer`: settings are checked, a run is assembled, and a stage is executed.

The functions below are imported when they are first called: what creates a Trainer needs none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .assembly import assemble_evaluation as assemble_evaluation, assemble_fit as assemble_fit
    from .auto_strategy import (
        choose_micro_batch as choose_micro_batch,
        choose_strategy as choose_strategy,
        plan_memory as plan_memory,
    )
    from .batch_sizes import (
        BatchSizeTest as BatchSizeTest,
        run_batch_size_search as run_batch_size_search,
        start_of_search as start_of_search,
    )
    from .console_summary import (
        box as box,
        end_lines as end_lines,
        next_lines as next_lines,
        start_lines as start_lines,
    )
    from .explicit_saves import save_ended_fit as save_ended_fit, write_pretrained as write_pretrained
    from .learning_rates import LearningRateTest as LearningRateTest, run_range_test as run_range_test
    from .run_documents import configuration as configuration, outcome as outcome
    from .run_report import open_report as open_report

_HOMES = {
    ".assembly": "assemble_evaluation assemble_fit",
    ".auto_strategy": "choose_micro_batch choose_strategy plan_memory",
    ".batch_sizes": "BatchSizeTest run_batch_size_search start_of_search",
    ".console_summary": "box end_lines next_lines start_lines",
    ".explicit_saves": "save_ended_fit write_pretrained",
    ".learning_rates": "LearningRateTest run_range_test",
    ".run_documents": "configuration outcome",
    ".run_report": "open_report",
}

__getattr__ = on_call(__name__, _HOMES)
