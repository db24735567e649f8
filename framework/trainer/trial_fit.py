"""``trial_fit``: a fit of a copy of the module, in a Trainer of its own, that leaves no trace."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

import torch

from ..distributed.seed import capture, restore
from ..memory.measure import copied

if TYPE_CHECKING:
    from ..api.callback import Callback
    from .session import Session, StageRequest


def trial_fit(session: Session, request: StageRequest, recorder: Callback, **settings: Any) -> Any:
    """Fit a copy of a module in a Trainer that writes nothing; return that Trainer. Collective.

    The module, generators and files are unchanged; the only callback is ``recorder``.

    Args:
        session: the state of the Trainer that was asked, whose class and arguments are used.
        request: the module and its training data.
        recorder: a callback.
        settings: arguments in place of those of the Trainer that was asked.
    """
    requested, new_trainer, random = session.requested, cast("Any", type(session.view)), capture()
    given = {each.name: getattr(requested, each.name) for each in fields(requested)}
    strategy = given["strategy"]
    quiet = {
        "strategy": strategy if isinstance(strategy, str) else strategy.clone(),
        "callbacks": recorder, "logger": False, "profiler": None, "barebones": False, "verbose": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_report": False, "fast_dev_run": False, "max_epochs": -1, "max_time": None, "duration": None,
        "min_epochs": None,
        "min_steps": None, "limit_val_batches": 0, "num_sanity_val_steps": 0, "val_check_interval": None,
        "check_val_every_n_epoch": 1, "nonfinite": "ignore", "max_restarts": 0, "snapshots": False,
        "notify": None,
    }  # fmt: skip
    try:
        twin = copied(request.module, torch.clone)
        # Callbacks of the module may write files.
        twin.configure_callbacks = list  # type: ignore[method-assign]
        trainer = new_trainer(**{**given, **quiet, **settings})
        trainer.fit(twin, request.given["train"], datamodule=copy.copy(request.datamodule))
    finally:
        restore(random)
    return trainer
