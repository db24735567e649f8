"""`Trainer`: settings are checked, a run is assembled, and a stage is executed."""

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
    from .learning_rates import LearningRateTest as LearningRateTest, run_range_test as run_range_test
    from .pretrained_folder import write_pretrained as write_pretrained
    from .run_facts import memory_facts as memory_facts, model_facts as model_facts
    from .run_view import open_report as open_report

_HOMES = {
    ".assembly": "assemble_evaluation assemble_fit",
    ".auto_strategy": "choose_micro_batch choose_strategy plan_memory",
    ".batch_sizes": "BatchSizeTest run_batch_size_search start_of_search",
    ".learning_rates": "LearningRateTest run_range_test",
    ".pretrained_folder": "write_pretrained",
    ".run_facts": "memory_facts model_facts",
    ".run_view": "open_report",
}

__getattr__ = on_call(__name__, _HOMES)
