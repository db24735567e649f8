"""Steps and hooks set on the object, hooks switched off with None, and the module's own backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from messages import refuses
from models import ByHand, Regressor, loader, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor

from phalanx import Callback, DataModule
from phalanx.framework.core.errors import ConfigurationError


class Validated(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.validated = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1

    def val_dataloader(self) -> Any:
        return loader(8)


def test_hooks_set_on_the_objects_are_called() -> None:
    module: Any = Validated()
    callback: Any = Callback()
    seen: list[str] = []

    def after_transfer(batch: Any, dataloader_idx: int) -> Any:
        seen.append("batch")
        return batch

    callback.on_train_end = lambda trainer, module: seen.append("callback")
    module.on_train_start = lambda: seen.append("start")
    module.on_after_batch_transfer = after_transfer
    module.training_step = lambda batch, batch_idx: module(batch[0]).sum()
    module.batch_weight = lambda batch: 2
    trainer = silent_trainer(devices=1, max_steps=1, callbacks=[callback], num_sanity_val_steps=0)
    trainer.fit(module, loader(8))
    assert seen == ["start", "batch", "callback"]
    assert module.losses == []


@pytest.mark.parametrize("switched_off", ["validation_step", "val_dataloader"])
def test_none_switches_validation_off(switched_off: str) -> None:
    module = Validated()
    setattr(module, switched_off, None)
    trainer = silent_trainer(devices=1, max_epochs=1)
    trainer.fit(module, loader(8))
    assert module.validated == 0
    assert trainer.num_val_batches == []


def test_none_switches_hooks_off() -> None:
    class Failing(Validated):
        def on_train_start(self) -> None:
            raise AssertionError

    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return loader(8)

        def val_dataloader(self) -> Any:
            raise AssertionError

    module, data = Failing(), Data()
    module.on_train_start = None  # type: ignore[assignment,method-assign]
    data.val_dataloader = None  # type: ignore[assignment,method-assign]
    silent_trainer(devices=1, max_epochs=1, num_sanity_val_steps=0).fit(module, datamodule=data)
    # The module's own loader takes the place of the DataModule's.
    assert module.validated == 2


class OwnBackward(Regressor):
    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.passed: list[float] = []

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.passed.append(loss.item())
        super().backward(loss, *args, **kwargs)


class ManualBackward(ByHand, OwnBackward):
    """The same, by manual optimization."""


def test_an_own_backward_receives_the_weighted_loss() -> None:
    module, plain = OwnBackward(), Regressor(optimizer="sgd")
    for each in (module, plain):
        silent_trainer(devices=1, max_epochs=1, accumulate_grad_batches=2).fit(each, loader(16))
    assert module.passed == pytest.approx([loss / 2 for loss in module.losses])
    assert torch.equal(weights_of(module), weights_of(plain))
    manual = ManualBackward()
    silent_trainer(devices=1, max_epochs=1).fit(manual, loader(8))
    assert manual.passed == manual.losses != []


def trained(own: bool) -> Tensor:
    module = OwnBackward() if own else Regressor(optimizer="sgd")
    # Rank 1 has no third batch, so that it takes part in the last reduction without a loss.
    silent_trainer(devices=2, max_epochs=2, strategy="ddp").fit(module, loader(12))
    return weights_of(module)


def test_an_own_backward_on_several_ranks() -> None:
    own, plain = (run_on_ranks(2, trained, given) for given in (True, False))
    for rank in range(2):
        assert torch.equal(own[rank], plain[rank])


def test_an_own_backward_under_a_strategy_that_computes_gradients_itself() -> None:
    with refuses(ConfigurationError, "OwnBackward", "strategy='fsdp'"):
        silent_trainer(devices=1, strategy="fsdp").fit(OwnBackward(), loader(8))
