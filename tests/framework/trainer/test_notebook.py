"""Where there is no script to run again, ranks are forked, and what they came to is brought back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Regressor, loader, silent_trainer, weights_of
from torch import Tensor

from phalanx import Callback, Trainer
from phalanx.callbacks import EarlyStopping, ModelCheckpoint
from phalanx.framework.core.errors import RankError
from phalanx.strategies import FSDPStrategy


class Logging(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.nn.functional.mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        output: Tensor = self(batch[0])
        return output


class Counting(Callback):
    """Counts the batches of rank 0, in a state of its own."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1


def fitted(ranks: int, root: Path, **arguments: Any) -> tuple[Logging, Trainer]:
    module = Logging()
    callbacks = [Counting(), EarlyStopping("val_loss", patience=5), ModelCheckpoint(monitor="val_loss")]
    trainer = silent_trainer(
        devices=ranks, max_epochs=2, enable_checkpointing=True, default_root_dir=root, callbacks=callbacks, **arguments
    )
    trainer.fit(module, loader(32, 8 // ranks), loader(16, 4))
    return module, trainer


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_two_forked_ranks_bring_everything_back(precision: str, tmp_path: Path) -> None:
    module, trainer = fitted(2, tmp_path / "two", precision=precision)
    alone, single = fitted(1, tmp_path / "one", precision=precision)
    torch.testing.assert_close(weights_of(module), weights_of(alone), rtol=1e-5, atol=1e-6)
    assert module.dtype == alone.dtype
    assert (trainer.global_step, trainer.current_epoch) == (single.global_step, single.current_epoch) == (8, 2)
    assert trainer.progress == single.progress
    assert trainer.state.finished
    assert trainer.callback_metrics.keys() == single.callback_metrics.keys()
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(
        float(single.callback_metrics["val_loss"]), rel=1e-5
    )
    (counting,) = (callback for callback in trainer.callbacks if isinstance(callback, Counting))
    assert counting.batches == 8
    stopping, saver = trainer.early_stopping_callback, trainer.checkpoint_callback
    assert isinstance(stopping, EarlyStopping)
    assert isinstance(saver, ModelCheckpoint)
    watched = single.early_stopping_callback
    assert isinstance(watched, EarlyStopping)
    assert float(stopping.best_score) == pytest.approx(float(watched.best_score), rel=1e-5)
    assert Path(saver.best_model_path).is_dir()
    assert trainer.checkpoint_dir == Path(saver.best_model_path).parent


def test_evaluations_use_the_fitted_weights(tmp_path: Path) -> None:
    module, trainer = fitted(2, tmp_path)
    (metrics,) = trainer.validate(dataloaders=loader(16, 4), verbose=False)
    assert metrics["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]))
    predictions = trainer.predict(dataloaders=loader(16, 4))
    assert predictions is not None
    with torch.no_grad():
        expected = torch.cat([module(x) for x, _ in loader(16, 4)])
    torch.testing.assert_close(torch.cat(predictions), expected)
    again = trainer.validate(Logging(), loader(16, 4), ckpt_path="best", verbose=False)
    assert again[0].keys() == {"val_loss"}


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_forked_ranks_with_sharded_weights_bring_everything_back(strategy: str, tmp_path: Path) -> None:
    module, trainer = fitted(2, tmp_path / "sharded", strategy=strategy)
    alone, single = fitted(1, tmp_path / "one")
    torch.testing.assert_close(weights_of(module), weights_of(alone), rtol=1e-5, atol=1e-6)
    assert (trainer.global_step, trainer.current_epoch) == (single.global_step, single.current_epoch) == (8, 2)
    trained = weights_of(module)
    (metrics,) = trainer.test(module, loader(16, 4), verbose=False)
    assert metrics["val_loss"] == pytest.approx(float(single.callback_metrics["val_loss"]), rel=1e-5)
    predictions = trainer.predict(module, loader(16, 4))
    assert predictions is not None
    assert torch.cat(predictions).shape == (16, 1)
    assert torch.equal(weights_of(module), trained)


def test_weights_that_a_strategy_does_not_gather_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Logging()
    before = weights_of(module)
    strategy = FSDPStrategy(gather_weights="none")
    trainer = silent_trainer(devices=2, max_epochs=1, strategy=strategy, default_root_dir=tmp_path)
    trainer.fit(module, loader(32, 4))
    assert trainer.global_step == 4
    assert torch.equal(weights_of(module), before)
    assert "keeps the weights from before" in capsys.readouterr().out


class Interrupting(Callback):
    """Sends SIGINT to the process that forked the ranks, as an interpreter does, after some optimizer steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and trainer.global_step == self.step:
            os.kill(os.getppid(), signal.SIGINT)

    def on_test_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.is_global_zero:
            os.kill(os.getppid(), signal.SIGINT)
        # Not signal.pause: a signal that arrives just before it would leave the rank in it.
        while True:
            time.sleep(0.01)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_an_interrupt_brings_back_what_was_trained(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "phalanx_logs" / "version_3").mkdir(parents=True)
    module = Logging()
    trainer = silent_trainer(
        devices=2,
        max_epochs=500,
        strategy=strategy,
        enable_checkpointing=True,
        default_root_dir=tmp_path,
        callbacks=[Interrupting(3)],
    )
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        trainer.fit(module, loader(32, 4))
    assert signal.getsignal(signal.SIGINT) is handler
    assert trainer.global_step >= 3
    assert trainer.state.status == "interrupted"
    assert trainer.run_dir == tmp_path / "phalanx_logs" / "version_4"
    saved = Logging.load_from_checkpoint(trainer.checkpoint_dir / "preempted.ckpt")
    assert torch.equal(weights_of(module), weights_of(saved))
    trained = weights_of(module)
    with pytest.raises(KeyboardInterrupt, match="test"):
        trainer.test(module, loader(32, 4))
    assert torch.equal(weights_of(module), trained)
    assert trainer.global_step >= 3


def test_an_error_in_a_rank_is_raised_in_the_notebook(tmp_path: Path) -> None:
    class Failing(Logging):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_rank == 1:
                raise RuntimeError("broken on purpose")
            return super().training_step(batch, batch_idx)

    (tmp_path / "phalanx_logs" / "version_0").mkdir(parents=True)
    trainer = silent_trainer(devices=2, max_epochs=1, enable_checkpointing=True, default_root_dir=tmp_path)
    with pytest.raises(RankError, match="broken on purpose"):
        trainer.fit(Failing(), loader(32, 4))
    assert trainer.run_dir == tmp_path / "phalanx_logs" / "version_1"
    assert trainer.state.status == "interrupted"
    trainer.fit(Logging(), loader(32, 4))
    assert trainer.global_step == 4
