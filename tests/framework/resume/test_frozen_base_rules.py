"""Checkpoints without the base: another base is refused, what was trained is kept, and tools name what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import network, regression_data, silent_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import phalanx
from phalanx import Callback, Trainer, TrainModule
from phalanx.callbacks import BackboneFinetuning, ModelCheckpoint, OnExceptionCheckpoint
from phalanx.framework.checkpoint.fingerprint import fingerprint, fingerprint_sum, fingerprint_text
from phalanx.framework.checkpoint.write_plan import Shard
from phalanx.framework.core.errors import CheckpointError


class Tuned(TrainModule):
    """Trains a head on a frozen base; leaves the base out of its checkpoints."""

    save_frozen = False

    def __init__(self, seed: int = 3, saves: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="seed")
        self.save_frozen = saves
        self.base = network(seed).requires_grad_(False)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.head = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = nn.functional.mse_loss(self.head(self.base(batch[0])), batch[1])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


BASE = {"base.0.weight", "base.0.bias", "base.3.weight", "base.3.bias"}


def batches() -> DataLoader[Any]:
    return DataLoader(regression_data(32), batch_size=4)


def fitted(path: Path, module: Tuned | None = None, *callbacks: Callback, resume: Any = None) -> tuple[Tuned, Trainer]:
    module = module or Tuned()
    trainer = silent_trainer(devices=1, max_steps=4, callbacks=list(callbacks))
    trainer.fit(module, batches(), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return module, trainer


def left_out(path: str | Path) -> set[str]:
    return set(phalanx.checkpoint.open_checkpoint(path).left_out)


# ---- contents --------------------------------------------------------------------------------------------------------


def test_by_default_everything_is_saved(tmp_path: Path) -> None:
    fitted(tmp_path / "full.ckpt", Tuned(saves=True))
    assert left_out(tmp_path / "full.ckpt") == set()


def test_frozen_weights_are_fingerprints_and_the_rest_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "lean.ckpt"
    module, _ = fitted(path)
    assert left_out(path) == BASE
    opened = phalanx.checkpoint.open_checkpoint(path)
    assert torch.equal(opened.read("model", "head.weight"), module.head.weight)
    record = opened.left_out["base.0.weight"]
    assert (record.dtype, record.shape, record.parts) == ("F32", (16, 6), ())
    assert record.fingerprint == fingerprint(module.state_dict()["base.0.weight"])


def test_weights_that_were_trained_or_changed_are_saved(tmp_path: Path) -> None:
    class Change(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 1:
                module.base[0].bias.data += 1.0
                module.base[3].weight.requires_grad_(True)
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "unfrozen.ckpt")
                module.base[3].weight.requires_grad_(False)

    module, _ = fitted(tmp_path / "after.ckpt", None, Change())
    for path in ("unfrozen.ckpt", "after.ckpt"):
        assert left_out(tmp_path / path) == {"base.0.weight", "base.3.bias"}
    again = Tuned.load_from_checkpoint(tmp_path / "after.ckpt")
    assert all(torch.equal(one, module.state_dict()[name]) for name, one in again.state_dict().items())


def test_weights_of_a_full_checkpoint_that_the_code_does_not_build_are_saved(tmp_path: Path) -> None:
    fitted(tmp_path / "full.ckpt", Tuned(seed=8, saves=True))
    trainer = silent_trainer(devices=1, max_steps=6)
    module = Tuned()
    trainer.fit(module, batches(), ckpt_path=tmp_path / "full.ckpt")
    trainer.save_checkpoint(tmp_path / "lean.ckpt")
    assert left_out(tmp_path / "lean.ckpt") == set()
    assert torch.equal(module.state_dict()["base.0.weight"], Tuned(seed=8).state_dict()["base.0.weight"])


def test_every_kind_of_save_leaves_the_base_out(tmp_path: Path) -> None:
    class Fail(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 3:
                raise ValueError("planned")

    savers = [
        ModelCheckpoint(dirpath=tmp_path / "steps", every_n_train_steps=2, save_top_k=-1, asynchronous=True),
        ModelCheckpoint(dirpath=tmp_path / "weights", every_n_train_steps=2, save_weights_only=True),
        OnExceptionCheckpoint(tmp_path / "failed"),
    ]
    trainer = silent_trainer(devices=1, max_steps=4, callbacks=[*savers, Fail()], enable_checkpointing=None)
    with pytest.raises(ValueError, match="planned"):
        trainer.fit(Tuned(), batches())
    found = sorted(tmp_path.glob("*/*.ckpt"))
    assert [path.parent.name for path in found] == ["failed", "steps", "weights"]
    assert all(left_out(path) == BASE for path in found)


# ---- loading ---------------------------------------------------------------------------------------------------------


def test_another_base_is_refused_wherever_it_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "lean.ckpt"
    fitted(path)
    other = Tuned(seed=4)
    before = {name: one.clone() for name, one in other.state_dict().items()}
    trainer = silent_trainer(devices=1, max_steps=6)
    with refuses(CheckpointError, "base.0.weight"):
        trainer.fit(other, batches(), ckpt_path=path)
    with refuses(CheckpointError, "base.0.weight"):
        trainer.validate(other, batches(), ckpt_path=path)
    with refuses(CheckpointError, "base.0.weight"):
        Tuned.load_from_checkpoint(path, seed=4, strict=False)
    assert all(torch.equal(one, before[name]) for name, one in other.state_dict().items())


def test_another_dtype_of_the_base_is_refused(tmp_path: Path) -> None:
    fitted(tmp_path / "lean.ckpt")
    trainer = silent_trainer(devices=1, max_steps=6, precision="bf16-true")
    with refuses(CheckpointError, "base.0.weight", "BF16", "F32"):
        trainer.fit(Tuned(), batches(), ckpt_path=tmp_path / "lean.ckpt")


class Backbone(Tuned):
    """Has its base under the name that ``BackboneFinetuning`` expects."""

    @property
    def backbone(self) -> nn.Module:
        return self.base

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((one for one in self.parameters() if one.requires_grad), lr=0.1, momentum=0.9)


def finetuned(root: Path, resume: Path | None = None) -> tuple[Backbone, list[Path]]:
    """Train four epochs, the base from the third on; return the module and the checkpoint of each epoch."""
    module = Backbone()
    module.base.requires_grad_(True)
    saver = ModelCheckpoint(dirpath=root, filename="{epoch}", save_top_k=-1)
    callbacks = [BackboneFinetuning(unfreeze_backbone_at_epoch=2), saver]
    trainer = silent_trainer(devices=1, max_epochs=4, callbacks=callbacks, enable_checkpointing=None)
    trainer.fit(module, batches(), ckpt_path=resume)
    return module, sorted(root.glob("*.ckpt"))


def test_weights_that_a_callback_unfreezes_are_saved_and_a_fit_resumes_from_every_epoch(tmp_path: Path) -> None:
    whole, saved = finetuned(tmp_path / "whole")
    assert [left_out(path) for path in saved] == [BASE, BASE, set(), set()]
    for number, path in enumerate(saved[:3]):
        module, _ = finetuned(tmp_path / str(number), path)
        assert all(torch.equal(one, module.state_dict()[name]) for name, one in whole.state_dict().items())


# ---- tools -----------------------------------------------------------------------------------------------------------


def test_readers_name_what_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lean.ckpt"
    fitted(path)
    with refuses(CheckpointError, "'base.0.weight'"):
        phalanx.checkpoint.consolidate(path, tmp_path / "model.safetensors")
    with refuses(CheckpointError, "'base.0.weight'"):
        phalanx.checkpoint.weights(path)
    assert [one.name for one in tmp_path.iterdir()] == ["lean.ckpt"]
    assert phalanx.checkpoint.verify(path) == []


def test_a_difference_compares_fingerprints_with_values(tmp_path: Path) -> None:
    fitted(tmp_path / "lean.ckpt")
    fitted(tmp_path / "full.ckpt", Tuned(saves=True))
    fitted(tmp_path / "other.ckpt", Tuned(seed=4))
    assert phalanx.checkpoint.diff(tmp_path / "lean.ckpt", tmp_path / "full.ckpt").sections["model"].equal
    found = phalanx.checkpoint.diff(tmp_path / "other.ckpt", tmp_path / "full.ckpt").sections["model"]
    assert set(found.fingerprints) == BASE
    assert not found.equal
    assert set(found.values) == {"head.weight", "head.bias"}


# ---- fingerprints ----------------------------------------------------------------------------------------------------


def test_a_fingerprint_does_not_depend_on_the_pieces() -> None:
    full = torch.randn(6, 5, 4)
    expected = fingerprint(full)
    for dim, cut in ((0, 2), (1, 3), (2, 1)):
        first, second = full.split([cut, full.shape[dim] - cut], dim)
        offsets = tuple(cut if each == dim else 0 for each in range(3))
        pieces = [Shard(first, (6, 5, 4), (0, 0, 0)), Shard(second, (6, 5, 4), offsets)]
        assert fingerprint_text(sum(int(fingerprint_sum(piece)) for piece in pieces)) == expected
    flat = [Shard.flat(full.reshape(-1)[start:stop], (6, 5, 4), start) for start, stop in ((0, 7), (7, 7), (7, 120))]
    assert fingerprint_text(sum(int(fingerprint_sum(piece)) for piece in flat)) == expected


def test_a_fingerprint_changes_with_any_value_and_position() -> None:
    tensors = [torch.zeros(70_000), torch.zeros(70_000), torch.arange(70_000.0), torch.arange(70_000.0).flip(0)]
    tensors[1][66_000] = -0.0
    changed = tensors[2].clone()
    changed[[3, 4]] = changed[[4, 3]]
    found = [fingerprint(one) for one in [*tensors, changed]]
    assert len(set(found)) == len(found)
    dtypes = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex64]
    for dtype in dtypes:
        one = torch.zeros(3, dtype=dtype)
        assert fingerprint(one) != fingerprint(torch.ones(3, dtype=dtype))
    assert fingerprint(torch.tensor(1.5)) != fingerprint(torch.tensor(2.5))
