"""A Trainer with one device in a script whose ranks were started for a Trainer with more: rank 0 works alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks, run_script
from torch import nn
from torchmetrics import MeanMetric

from phalanx import Callback
from phalanx.framework.core.errors import ConfigurationError, RankError


class Scored(Regressor):
    """Computes a metric by itself, which torchmetrics synchronizes where there is a process group."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(nn.functional.mse_loss(self(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.log("val", self.mean.compute(), rank_zero_only=False)
        self.mean.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class Counting(Callback):
    def __init__(self) -> None:
        self.batches = 0

    def on_validation_batch_end(self, *_: Any) -> None:
        self.batches += 1


def validated(module: Any, devices: int | str) -> tuple[float, int]:
    counting = Counting()
    trainer = silent_trainer(devices=devices, callbacks=[counting])
    (metrics,) = trainer.validate(module, loader(16, 4), verbose=False)
    return metrics["val"], counting.batches


def fit_and_evaluate(strategy: str) -> dict[str, Any]:
    module = Scored()
    trainer = silent_trainer(devices=2, strategy=strategy, max_epochs=1)
    trainer.fit(module, loader(16, 4))
    variables, group = dict(os.environ), dist.group.WORLD
    # The next call has the same line on rank 0, in another place of the stack.
    guarded = validated(module, 1) if trainer.is_global_zero else None
    trainer.fit(module, loader(16, 4))
    found: dict[str, Any] = {"guarded": guarded, "alone": validated(module, 1), "auto": validated(module, "auto")}
    predictions = silent_trainer(devices=1).predict(module, loader(16, 4))
    found["predictions"] = len(predictions or [])
    one = silent_trainer(devices=1, max_epochs=1)
    one.fit(module, loader(16, 4))
    found["fit"] = one.global_step, one.current_epoch, one.state.finished
    found["after"] = validated(module, 2)[0]
    assert dict(os.environ) == variables
    assert dist.group.WORLD is group
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_rank_zero_alone_after_a_fit_on_two_ranks(strategy: str) -> None:
    first, second = run_on_ranks(2, fit_and_evaluate, strategy)
    assert first["alone"] == (pytest.approx(second["auto"][0], rel=1e-5), 4)
    assert second["alone"] == (first["alone"][0], 0)
    assert first["guarded"][0] != first["alone"][0]
    assert (first["auto"][1], second["auto"][1]) == (2, 2)
    assert first["predictions"] == second["predictions"] == 4
    assert first["fit"] == second["fit"] == (4, 1, True)
    # The stage after it has the weights of rank 0 on all ranks.
    assert first["after"] == second["after"] != first["alone"][0]


def failure(strategy: str | None) -> str:
    """Return the error of a stage on one device, whose strategy needs a group or whose module fails on rank 0."""
    silent_trainer(devices=2, max_epochs=1).fit(Scored(), loader(16, 4))
    module = Scored()
    if strategy is None and dist.get_rank() == 0:
        module.mean = torch.nn.Identity()  # type: ignore[assignment]
    try:
        silent_trainer(devices=1, strategy=strategy or "auto").validate(module, loader(16, 4), verbose=False)
    except (AttributeError, ConfigurationError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_an_error_of_rank_zero_reaches_the_ranks_that_wait() -> None:
    first, second = run_on_ranks(2, failure, None)
    assert first.startswith("AttributeError")
    assert second == f"RankError: rank 0 failed in Trainer.validate: {first}"


def test_a_strategy_that_needs_a_group_is_refused() -> None:
    first, second = run_on_ranks(2, failure, "fsdp")
    assert first.startswith("ConfigurationError: This strategy needs a process group, which rank 0 cannot have alone")
    assert "which rank 0 cannot have alone" in second


SCRIPT = """
import sys
from models import Regressor, loader, silent_trainer

one = silent_trainer(devices=1, max_epochs=1)
two = silent_trainer(devices=2, max_epochs=2)
module = Regressor()
one.fit(module, loader(16, 4))
two.fit(module, loader(16, 4))
print("steps", one.global_step, two.global_step)
"""


def test_one_device_first_and_two_after_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n" + SCRIPT)
    result = run_script(script)
    assert result.returncode == 0, result.stdout
    assert "steps 4 4" in result.stdout
