"""Hooks are called in Lightning's order, and those that nobody overrides are not called at all."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Callback, Trainer, TrainModule
from phalanx.framework.api import callback as callback_file

# What differs on purpose, and is compared apart:
# - loaders are asked for before the optimizers are made, so that configure_optimizers knows the number of steps;
# - optimizer_step comes when gradients are there, rather than around the forward and backward of the last micro-batch;
# - all schedulers by epoch step after on_train_epoch_end, when every metric of the epoch is known.
ELSEWHERE = {"train_dataloader", "val_dataloader", "test_dataloader", "optimizer_step", "lr_scheduler_step"}

PHALANX = SimpleNamespace(Module=TrainModule, Callback=Callback, Trainer=Trainer)
_MODULE_HOOKS = (
    "setup", "teardown", "prepare_data", "configure_model", "configure_callbacks", "configure_gradient_clipping",
    "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step",
)  # fmt: skip
# Overriding these replaces what the framework does, in Lightning too.
_REPLACING = {"on_before_batch_transfer", "on_after_batch_transfer"}


def hooks_of(cls: type) -> list[str]:
    """Return the hooks of Lightning's that phalanx has too, but for those that replace something."""
    own = PHALANX.Module if hasattr(cls, "training_step") else PHALANX.Callback
    known = [n for n in dir(cls) if hasattr(own, n) and callable(getattr(cls, n))]
    names = [n for n in known if n.startswith("on_") or n in _MODULE_HOOKS]
    return [n for n in names if n not in _REPLACING and not n.endswith(("_model_eval", "_model_train"))]


def spied(base: type, name: str, note: Callable[[str], None], label: str) -> Any:
    inherited = getattr(base, name)

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(f"{label}.{name}")
        return inherited(self, *args, **kwargs)

    hook.__dict__["__signature__"] = inspect.signature(inherited)
    return hook


def module_class(base: Any, calls: list[str]) -> Any:
    """Return a module that notes the calls of its steps and of every hook."""

    class Noting(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            calls.append("module.training_step")
            return self.layer(batch[0]).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            calls.append("module.validation_step")

        def test_step(self, batch: Any, batch_idx: int) -> None:
            calls.append("module.test_step")

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            calls.append("module.predict_step")
            return batch[0]

        def configure_optimizers(self) -> Any:
            calls.append("module.configure_optimizers")
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]

        def train_dataloader(self) -> Any:
            calls.append("module.train_dataloader")
            return batches()

        def val_dataloader(self) -> Any:
            calls.append("module.val_dataloader")
            return batches()

        def test_dataloader(self) -> Any:
            calls.append("module.test_dataloader")
            return batches()

        def predict_dataloader(self) -> Any:
            return batches()

    for name in hooks_of(base):
        if name not in vars(Noting):
            setattr(Noting, name, spied(base, name, calls.append, "module"))
    return Noting


def batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)


def recorded(framework: Any, entry: str, **settings: Any) -> list[str]:
    """Return every call of a hook or step, in order."""
    calls: list[str] = []
    noting = type("Noting", (framework.Callback,), {})
    for name in hooks_of(framework.Callback):
        setattr(noting, name, spied(framework.Callback, name, calls.append, "callback"))
    switches = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)
    limits = {f"limit_{each}_batches": 2 for each in ("train", "val", "test", "predict")}
    # To choose a strategy by memory, phalanx would build a copy of the model first.
    strategy = "single" if framework.Module is TrainModule else "auto"
    arguments = {"max_epochs": 1, "num_sanity_val_steps": 1, "accelerator": "cpu", "devices": 1, "strategy": strategy}
    trainer = framework.Trainer(callbacks=[noting()], **{**switches, **limits, **arguments, **settings})
    getattr(trainer, entry)(module_class(framework.Module, calls)())
    return calls


def lightning_recorded(entry: str, **settings: Any) -> list[str]:
    """Return the same calls under Lightning, which is silenced."""
    with pytest.MonkeyPatch.context() as patch:
        # Lightning sets this one when it is imported.
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        lightning = pytest.importorskip("lightning", minversion="2.6")
    framework = SimpleNamespace(
        Module=lightning.LightningModule, Callback=lightning.Callback, Trainer=lightning.Trainer
    )
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return recorded(framework, entry, **settings)
    finally:
        log.setLevel(level)


def comparable(calls: Sequence[str]) -> list[str]:
    return [call for call in calls if call.partition(".")[2] not in ELSEWHERE]


@pytest.mark.parametrize(
    ("entry", "settings"),
    [
        ("fit", {"max_epochs": 2, "limit_train_batches": 3, "accumulate_grad_batches": 2}),
        ("fit", {"limit_train_batches": 4, "val_check_interval": 0.25, "num_sanity_val_steps": 0}),
        ("fit", {"max_epochs": 3, "check_val_every_n_epoch": 2}),
        ("fit", {"max_steps": 3, "max_epochs": -1}),
        ("fit", {"limit_val_batches": 0}),
        ("fit", {"fast_dev_run": True}),
        ("validate", {}),
        ("test", {}),
        ("predict", {}),
    ],
)
def test_hooks_come_in_lightnings_order(entry: str, settings: dict[str, Any]) -> None:
    expected = lightning_recorded(entry, **settings)
    assert comparable(recorded(PHALANX, entry, **settings)) == comparable(expected)


def both(name: str) -> list[str]:
    return [f"callback.{name}", f"module.{name}"]


def batch_of_one_update() -> list[str]:
    return [
        *both("on_train_batch_start"), "module.training_step", *both("on_before_zero_grad"),
        "module.optimizer_zero_grad", *both("on_before_backward"), *both("on_after_backward"),
        *both("on_before_optimizer_step"), "module.configure_gradient_clipping", "module.optimizer_step",
        *both("on_train_batch_end"),
    ]  # fmt: skip


def validation(batch_count: int) -> list[str]:
    batch = [*both("on_validation_batch_start"), "module.validation_step", *both("on_validation_batch_end")]
    return [
        *both("on_validation_start"), *both("on_validation_epoch_start"), *batch * batch_count,
        *both("on_validation_epoch_end"), *both("on_validation_end"),
    ]  # fmt: skip


def test_every_call_of_a_fit() -> None:
    assert recorded(PHALANX, "fit") == [
        "module.configure_callbacks", "module.prepare_data", *both("setup"),
        "module.train_dataloader", "module.val_dataloader", "module.configure_model", "module.configure_optimizers",
        *both("on_fit_start"),
        "callback.on_sanity_check_start", *validation(1), "callback.on_sanity_check_end",
        *both("on_train_start"), *both("on_train_epoch_start"),
        *batch_of_one_update() * 2,
        "module.on_validation_model_zero_grad", *validation(2),
        *both("on_train_epoch_end"), "module.lr_scheduler_step",
        *both("on_train_end"), *both("on_fit_end"), *both("teardown"),
    ]  # fmt: skip


def test_callbacks_that_monitor_come_after_the_modules_own_hook() -> None:
    calls: list[str] = []

    class Watching(Callback):
        monitors = True

        def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
            calls.append("watching.on_train_epoch_end")

        def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
            calls.append("watching.on_validation_end")

    module = module_class(TrainModule, calls)()
    Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1,
        enable_model_summary=False, callbacks=[Watching()], num_sanity_val_steps=0,
    ).fit(module)  # fmt: skip
    for name in ("on_train_epoch_end", "on_validation_end"):
        assert calls.index(f"watching.{name}") > calls.index(f"module.{name}")


def test_hooks_that_are_not_overridden_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Idle(Callback):
        pass

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a hook that nobody overrides was called")

    in_loops = [name for name in hooks_of(TrainModule) if name.startswith("on_")]
    for name in in_loops:
        assert getattr(Plain, name) is getattr(TrainModule, name)
    with monkeypatch.context() as patch:
        for name in in_loops:
            patch.setattr(TrainModule, name, never)
        for name in [name for name in hooks_of(Callback) if name.startswith("on_")]:
            patch.setattr(callback_file.Callback, name, never)
        Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1,
            enable_model_summary=False, callbacks=[Idle()],
        ).fit(Plain(), batches())  # fmt: skip
