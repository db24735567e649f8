"""``trainer.save_checkpoint`` after ``fit`` and behind it: a run resumed from it is the run that never stopped."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from messages import refuses
from models import Regressor, equal, loader, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import Trainer
from phalanx.callbacks import LambdaCallback, WeightAveraging
from phalanx.checkpoint import verify
from phalanx.framework.checkpoint.reader import open_checkpoint
from phalanx.framework.core.errors import ConfigurationError


class Trained(Regressor):
    """Dropout, a schedule and values logged for the epoch: all of a run that a checkpoint holds."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def trainer_of(strategy: str, ranks: int, limit: dict[str, int], precision: str, root: str) -> Trainer:
    # The hook draws random numbers where a longer fit would not.
    callbacks = [WeightAveraging(), LambdaCallback(on_train_end=lambda trainer, module: torch.rand(3))]
    return silent_trainer(
        strategy=strategy, devices=ranks, precision=precision, callbacks=callbacks, default_root_dir=root, **limit
    )


def fitted(trainer: Trainer, ckpt: str | None = None) -> Trained:
    torch.manual_seed(5)
    module = Trained()
    trainer.fit(module, loader(22, 3, shuffle=True), ckpt_path=ckpt)
    return module


def content(path: str) -> dict[str, Any]:
    checkpoint = open_checkpoint(path)
    sections = {
        each: {key: checkpoint.read(each, key) for key in checkpoint.names(each)} for each in checkpoint.sections
    }
    document = {key: value for key, value in checkpoint.document.items() if key not in ("run", "loggers")}
    return {"sections": sections, "document": document, "ranks": checkpoint.rank_documents}


def longer(strategy: str, ranks: int, limits: tuple[dict[str, int], dict[str, int]], precision: str, root: str) -> None:
    """Train to a limit, evaluate, save, resume with a higher limit, and compare with the run that did not stop."""
    short, long = limits
    paths = {name: f"{root}/{name}.ckpt" for name in ("half", "weights", "resumed", "whole")}
    first = trainer_of(strategy, ranks, short, precision, root)
    module = fitted(first)
    first.test(module, loader(8), verbose=False)
    first.save_checkpoint(paths["half"])
    first.save_checkpoint(paths["weights"], weights_only=True)
    resumed = trainer_of(strategy, ranks, long, precision, root)
    fitted(resumed, paths["half"])
    resumed.save_checkpoint(paths["resumed"], asynchronous=True)
    whole = trainer_of(strategy, ranks, long, precision, root)
    fitted(whole)
    whole.save_checkpoint(paths["whole"])
    assert resumed.global_step == whole.global_step
    assert equal(content(paths["resumed"]), content(paths["whole"]))
    half, weights = content(paths["half"]), content(paths["weights"])
    assert equal(half["sections"]["model"], weights["sections"]["model"])
    assert "optimizer" in half["sections"]
    assert "optimizer" not in weights["sections"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("phalanx-delete")]


EPOCHS = {"max_epochs": 2}, {"max_epochs": 3}
# Ends within the second epoch, at batch 3 of a rank.
STEPS = {"max_steps": 7}, {"max_steps": 11}


@pytest.mark.parametrize(
    ("strategy", "limits", "precision"),
    [
        ("auto", EPOCHS, "16-mixed"),
        ("auto", STEPS, "16-mixed"),
        ("ddp", EPOCHS, "32-true"),
        ("fsdp", STEPS, "bf16-true"),
        ("hsdp", EPOCHS, "32-true"),
        ("zero2", EPOCHS, "32-true"),
        ("zero3", STEPS, "bf16-true"),
    ],
)
def test_a_fit_resumed_with_a_higher_limit(
    tmp_path: Path, strategy: str, limits: tuple[dict[str, int], dict[str, int]], precision: str
) -> None:
    ranks = 1 if strategy == "auto" else 2
    run_on_ranks(ranks, longer, strategy, ranks, limits, precision, str(tmp_path))


def test_the_last_checkpoint_of_a_fit_that_ended_within_an_epoch(tmp_path: Path) -> None:
    """Values logged in the epoch before the end count in the resumed run too."""

    def epoch_loss(limit: int, ckpt: Path | None) -> Tensor:
        torch.manual_seed(5)
        saving = LambdaCallback(on_train_end=lambda trainer, module: trainer.save_checkpoint(tmp_path / "end.ckpt"))
        trainer = silent_trainer(devices=1, max_steps=limit, callbacks=[saving])
        trainer.fit(Trained(), loader(22, 3, shuffle=True), ckpt_path=ckpt)
        return trainer.callback_metrics["loss_epoch"]

    epoch_loss(3, None)
    assert torch.equal(epoch_loss(6, tmp_path / "end.ckpt"), epoch_loss(6, None))


def refused(trainer: Trainer, path: Path, name: str) -> None:
    with refuses(ConfigurationError, name):
        trainer.save_checkpoint(path)
    assert not path.exists()


def test_there_is_nothing_to_save(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    trainer, module = silent_trainer(devices=1, max_epochs=1, default_root_dir=tmp_path), Trained()
    refused(trainer, path, "save_checkpoint")
    trainer.test(module, loader(8), verbose=False)
    refused(trainer, path, "save_checkpoint")
    trainer.fit(module, loader(8))
    trainer.save_checkpoint(path)
    trainer.test(Trained(), loader(8), ckpt_path=path, verbose=False)
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    trainer.test(module, loader(8), ckpt_path=path, verbose=False)
    refused(trainer, tmp_path / "mixed.ckpt", "x.ckpt")

    class Failing(Trained):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("no data")

    with pytest.raises(KeyError):
        trainer.fit(Failing(), loader(8))
    refused(trainer, tmp_path / "failed.ckpt", "failed.ckpt")


def test_a_state_that_no_file_holds_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    class Unsaved(Regressor):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([{"params": list(self.parameters()), "rule": object()}], lr=0.1)

    trainer = silent_trainer(devices=1, max_epochs=1)
    trainer.fit(Unsaved(), loader(8))
    refused(trainer, tmp_path / "x.ckpt", "['rule']")


def shards_after(strategy: str, root: str) -> list[bool]:
    """Return whether the optimizer's state is alive after a fit, and after the Trainer was dropped."""
    trainer = trainer_of(strategy, 2, {"max_epochs": 1}, "32-true", root)
    found: list[weakref.ref[Any]] = []

    def note(trainer: Any, module: Any) -> None:
        for _, slots in trainer.run.strategy.state.optimizer_state(trainer.optimizers[0]):
            found.append(weakref.ref(slots["exp_avg"].tensor.untyped_storage()))

    trainer.callbacks.append(LambdaCallback(on_train_end=note))
    module = fitted(trainer)
    groups = len(dist.distributed_c10d._world.pg_names)
    trainer.save_checkpoint(f"{root}/after.ckpt", weights_only=True)
    assert len(dist.distributed_c10d._world.pg_names) == groups
    held = trainer._session.records.ended_fit is not None
    del trainer
    module.trainer = None
    gc.collect()
    return [held, any(ref() is not None for ref in found)]


def test_the_state_is_released_with_the_trainer(tmp_path: Path) -> None:
    assert run_on_ranks(2, shards_after, "zero2", str(tmp_path)) == [[True, False]] * 2


def test_a_fit_in_forked_ranks(tmp_path: Path) -> None:
    trainer = silent_trainer(devices=2, max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(Trained(), loader(8))
    refused(trainer, tmp_path / "x.ckpt", "ranks")


# ---- asynchronous saves ----------------------------------------------------------------------------------------------


def save_both(trainer: Trainer, *_: Any) -> None:
    """At step 3, save asynchronously and synchronously."""
    if trainer.global_step == 3:
        trainer.save_checkpoint("here.ckpt")
        trainer.save_checkpoint("behind.ckpt", asynchronous=True)


def fit_and_resume(strategy: str, ranks: int, root: Path) -> tuple[list[float], list[float], list[float]]:
    """Return the losses after step 3: of a run that saves behind its training, and of those resumed from both saves."""
    os.chdir(root)
    settings: dict[str, Any] = {"strategy": strategy, "devices": ranks, "max_epochs": 1, "default_root_dir": root}
    whole = Regressor(dropout=0.1)
    silent_trainer(**settings, callbacks=[LambdaCallback(on_train_batch_end=save_both)]).fit(whole, loader(48))
    resumed = []
    for name in ("behind.ckpt", "here.ckpt"):
        module = Regressor(dropout=0.1)
        silent_trainer(**settings).fit(module, loader(48), ckpt_path=root / name)
        resumed.append(module.losses)
    return whole.losses[3:], resumed[0], resumed[1]


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2), ("zero3", 2)])
def test_a_run_resumed_from_an_asynchronous_save_equals_the_uninterrupted_run(
    tmp_path: Path, strategy: str, ranks: int
) -> None:
    for whole, behind, here in run_on_ranks(ranks, fit_and_resume, strategy, ranks, tmp_path, timeout=120.0):
        assert whole == behind == here
        assert len(whole) == 12 // ranks - 3
    saved = [content(str(tmp_path / name)) for name in ("behind.ckpt", "here.ckpt")]
    for each in saved:
        # It tells when and as what a checkpoint was saved.
        del each["document"]["state"]
    assert equal(*saved)
    assert verify(tmp_path / "behind.ckpt") == []
