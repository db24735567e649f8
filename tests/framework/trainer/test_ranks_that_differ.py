"""Ranks whose calls or arguments differ would wait for one another: they are refused before anything starts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import says
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks
from torch import nn

from phalanx import Callback
from phalanx.callbacks import LearningRateMonitor, ModelCheckpoint
from phalanx.framework.core.errors import ConfigurationError
from phalanx.loggers import CSVLogger


class Own(Callback):
    """A user's callback."""


class Shared(Callback):
    """One whose hooks call collectives."""

    collective = True


class Validated(Regressor):
    """A module with a metric of validation data."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))


def fit_as(rank: int, of_rank_1: dict[str, Any], validates: bool = True, stage: str = "fit") -> None:
    """Train for one epoch; on rank 1 with other arguments."""
    arguments: dict[str, Any] = {"devices": 2, "max_epochs": 1, **(of_rank_1 if rank else {})}
    arguments["callbacks"] = [make() for make in arguments.get("callbacks", [])]
    trainer = silent_trainer(**arguments)
    if rank and stage != "fit":
        trainer.validate(Validated(), loader(16))
    trainer.fit(Validated(), loader(16), loader(16) if validates or not rank else None)


def refused(cases: list[tuple[dict[str, Any], bool, str]]) -> list[str]:
    """Return the error of each case."""
    messages = []
    for case in cases:
        with pytest.raises(ConfigurationError) as raised:
            fit_as(torch.distributed.get_rank(), *case)
        messages.append(str(raised.value))
    return messages


def test_different_arguments_and_calls_are_refused_on_all_ranks() -> None:
    different: list[tuple[dict[str, Any], bool, str, list[str]]] = [
        ({"max_epochs": 2}, True, "fit", ["max_epochs=1", "max_epochs=2"]),
        ({"accumulate_grad_batches": {0: 1, 2: 2}}, True, "fit", ["=1)", "={0: 1, 2: 2})"]),
        ({"callbacks": [Shared]}, True, "fit", ["callbacks=[]", "Shared"]),
        ({}, False, "fit", ["fit(val_dataloaders=DataLoader)", "fit(val_dataloaders=None)"]),
        ({}, True, "validate", ["Trainer.fit", "Trainer.validate"]),
    ]
    messages, others = run_on_ranks(2, refused, [case[:3] for case in different])
    assert messages == others
    for text, (*_, words) in zip(messages, different, strict=True):
        says(text, *words, "rank 1")


def backend(graph: Any, inputs: Any) -> Any:
    """Compile nothing. Its text has an address, which differs between ranks."""
    return graph.forward


def fits(folder: Path, makers: list[Callable[[], Callback]]) -> int:
    """Train with what only rank 0 has; return the number of steps."""
    is_first = torch.distributed.get_rank() == 0
    trainer = silent_trainer(
        devices=2,
        max_epochs=1,
        accumulate_grad_batches={0: 2},
        compile={"backend": backend},
        default_root_dir=folder,
        logger=CSVLogger() if is_first else False,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(dirpath=tempfile.mkdtemp(dir=folder)), *(make() for make in makers if is_first)],
        verbose=is_first,
    )
    trainer.fit(Validated(), loader(16), loader(16))
    return trainer.global_step


def test_a_rank_may_have_loggers_and_callbacks_of_its_own(tmp_path: Path) -> None:
    assert run_on_ranks(2, fits, tmp_path, [Own, LearningRateMonitor]) == [1, 1]
