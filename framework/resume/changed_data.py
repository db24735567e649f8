"""Notes on data that differs from that of the interrupted run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.wording import counted
from ..run.run import Run


def warn_of_other_data(run: Run, saved: str | None, current: str | None) -> None:
    """Report another length or order of the data, for a checkpoint within an epoch."""
    if None not in (saved, current) and saved != current:
        run.note(
            f"The checkpoint was saved within an epoch of {saved}; the data has {current} now. The epoch continues at "
            "the same position, so that samples may be seen twice in it, or not at all."
        )


def warn_of_other_batch(run: Run, saved: Mapping[str, Any], samples: int | None) -> None:
    """Report another number of samples in an optimizer step, over all ranks.

    Args:
        run: the resumed run.
        saved: the document of the checkpoint.
        samples: the number of samples that a rank reads for an optimizer step now; None if unknown.
    """
    before, ranks = saved.get("step_samples"), int(saved.get("data_ranks") or 0)
    now = run.world.data_size
    if before is None or samples is None or not ranks or before * ranks == samples * now:
        return
    run.note(
        f"The checkpoint was saved with {before * ranks:,} samples in an optimizer step, on {counted(ranks, 'rank')}; "
        f"there are {samples * now:,} now, on {counted(now, 'rank')}. Learning rates, and schedules that count steps, "
        "stay as they were: to keep the number of samples, change batch_size or accumulate_grad_batches."
    )
