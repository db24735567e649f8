"""``self.log`` of a callback: in every hook the values, names and errors are those of Lightning."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from logged import KINDS, metrics_of
from messages import refuses
from models import SILENT, Regressor, loader, silent_trainer
from ranks import run_on_ranks
from torch import nn

from phalanx import Callback
from phalanx.framework.core.errors import MetricError

BOTH = {"on_step": True, "on_epoch": True, "prog_bar": True}
IN_STEPS = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end"),
)
IN_EPOCHS = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end")
IN_VALIDATION = (
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
    "on_validation_epoch_end",
)
NOWHERE = (
    *("setup", "teardown", "on_fit_start", "on_fit_end", "on_sanity_check_start", "on_sanity_check_end"),
    *("on_train_end", "on_validation_end"),
)


class Evaluated(Regressor):
    """Has a validation step, which logs nothing."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self(batch[0]), batch[1])


def writing(base: type, hooks: tuple[str, ...], **arguments: Any) -> Any:
    """Return a callback that logs the number of its call in each of the hooks."""

    def hook_of(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> None:
            self.calls[name] += 1
            self.log(f"in_{name}", self.calls[name], **arguments)
            self.log_dict({f"dict_{name}": 2.0 * self.calls[name]})

        return hook

    callback = type("Writing", (base,), {name: hook_of(name) for name in hooks})()
    callback.calls = Counter()
    return callback


def in_lightning(lightning: Any) -> Any:
    """Return a LightningModule with the body of ``Evaluated``."""
    body = {**vars(Regressor), **vars(Evaluated)}
    twin = type("InLightning", (lightning.LightningModule,), {k: v for k, v in body.items() if k[:2] != "__"})()
    twin.net, twin.losses = Regressor().net, []
    twin.save_hyperparameters({"lr": 0.05, "optimizer": "adamw"})
    return twin


SETTINGS: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 1, "log_every_n_steps": 1, "devices": 1}


@pytest.mark.parametrize(
    ("hooks", "arguments"),
    [((*IN_STEPS, *IN_EPOCHS, *IN_VALIDATION), {}), (IN_STEPS, BOTH), (IN_VALIDATION[2:4], BOTH)],
)
def test_values_and_names_are_lightnings(lightning: Any, hooks: tuple[str, ...], arguments: Any) -> None:
    ours, theirs = writing(Callback, hooks, **arguments), writing(lightning.Callback, hooks, **arguments)
    trainer = silent_trainer(**SETTINGS, callbacks=[ours])
    trainer.fit(Evaluated(), loader(10, 4), loader(7, 4))
    other = lightning.Trainer(**{**SILENT, **SETTINGS}, callbacks=[theirs])
    other.fit(in_lightning(lightning), loader(10, 4), loader(7, 4))
    assert ours.calls == theirs.calls
    found, expected = metrics_of(trainer), metrics_of(other)
    assert set(expected["callback_metrics"])
    for kind in KINDS:
        assert found[kind] == pytest.approx(expected[kind], rel=1e-6), kind


@pytest.mark.parametrize("hook", NOWHERE)
def test_hooks_where_lightning_refuses(lightning: Any, hook: str) -> None:
    with pytest.raises(lightning.utilities.exceptions.MisconfigurationException, match="can't"):
        lightning.Trainer(**{**SILENT, **SETTINGS}, callbacks=[writing(lightning.Callback, (hook,))]).fit(
            in_lightning(lightning), loader(10, 4), loader(7, 4)
        )
    with refuses(MetricError, "log("):
        silent_trainer(**SETTINGS, callbacks=[writing(Callback, (hook,))]).fit(Evaluated(), loader(10, 4), loader(7, 4))


def test_a_callback_that_monitors_may_not_log_after_the_reduction() -> None:
    callback = writing(Callback, ("on_train_epoch_end",))
    callback.monitors = True
    with refuses(MetricError, "'in_on_train_epoch_end'"):
        silent_trainer(**SETTINGS, callbacks=[callback]).fit(Evaluated(), loader(8))


def test_outside_of_a_run_nothing_is_logged() -> None:
    callback = writing(Callback, ("on_train_batch_end",))
    callback.on_train_batch_end()
    silent_trainer(**SETTINGS, callbacks=[callback]).fit(Evaluated(), loader(8))
    callback.on_train_batch_end()
    assert callback.calls["on_train_batch_end"] == 6


def on_two_ranks() -> dict[str, dict[str, float]]:
    hooks = ("on_train_batch_end", "on_validation_epoch_end")
    callback = writing(Callback, hooks, on_step=False, on_epoch=True, reduce_fx="sum")
    trainer = silent_trainer(**{**SETTINGS, "devices": 2, "max_epochs": 1}, callbacks=[callback])
    trainer.fit(Evaluated(), loader(16, 4), loader(8, 4))
    return metrics_of(trainer)


def test_an_epoch_value_is_that_of_all_ranks() -> None:
    first, second = run_on_ranks(2, on_two_ranks)
    assert first["callback_metrics"] == second["callback_metrics"]
    # Two batches on each rank; one validation after the sanity check.
    assert first["callback_metrics"]["in_on_train_batch_end"] == 2 * (1 + 2)
    assert first["callback_metrics"]["in_on_validation_epoch_end"] == 2 * 2
