"""The account of a run: files that a fit keeps while it trains, the report made from them, and its page.

Nothing here imports torch: the command line reads the files of runs that other processes write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .event_log import past_failures as past_failures, record_end as record_end
    from .finish import (
        add_to_report as add_to_report,
        amend_report as amend_report,
        ending as ending,
        finish_report as finish_report,
        label_of as label_of,
    )
    from .rewinds import rewinds_of as rewinds_of
    from .saved import best_checkpoint as best_checkpoint
    from .verdicts import how_to_resume as how_to_resume

__getattr__ = on_call(
    __name__,
    {
        ".event_log": "past_failures record_end",
        ".finish": "add_to_report amend_report ending finish_report label_of",
        ".rewinds": "rewinds_of",
        ".saved": "best_checkpoint",
        ".verdicts": "how_to_resume",
    },
)
