"""The data of a resumed run: the state of its data module, and notes on data that differs from before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint.codec import decode
from ..checkpoint.reader import Checkpoint
from ..core.wording import counted
from ..run.run import Run


def restore_data_module(run: Run, checkpoint: Checkpoint | None) -> None:
    """Load the state of the data module. This precedes the request for its loaders, which may depend on it.

    A converted checkpoint of Lightning has the state under the name of the class, beside the user's own values.
    """
    if checkpoint is None:
        return
    datamodule, encoded = run.context.datamodule, checkpoint.document.get("state") or {}
    own = "" if datamodule is None else type(datamodule).__qualname__
    if encoded.get("datamodule"):
        saved = decode(encoded["datamodule"], checkpoint.read_section("state"))
    elif own and own in encoded.get("user", {}) and "converted" in checkpoint.document:
        saved = {"class": own, "state": decode(encoded["user"][own], checkpoint.read_section("state"))}
    else:
        return
    if datamodule is None or saved["class"] != own:
        run.note(
            f"{checkpoint.path} holds the state of the data module {saved['class']}, which this run does not have; it "
            "is not loaded."
        )
        return
    datamodule.load_state_dict(saved["state"])


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
