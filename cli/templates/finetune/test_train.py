"""The backbone is frozen at first, and trained later. Start with ``pytest``."""

from pathlib import Path

import torch
from train import Digits, FineTuned

from phalanx import Trainer, seed_everything
from phalanx.callbacks import BackboneFinetuning


def test_the_backbone_is_trained_from_its_epoch_on(tmp_path: Path) -> None:
    for max_epochs, is_frozen in ((1, True), (2, False)):
        seed_everything(0)
        model = FineTuned()
        before = model.backbone.weight.clone()
        callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
        trainer = Trainer(
            accelerator="cpu", devices=1, max_epochs=max_epochs, callbacks=callback, default_root_dir=tmp_path
        )
        trainer.fit(model, datamodule=Digits())
        assert torch.equal(model.backbone.weight, before) == is_frozen
        assert trainer.callback_metrics["train/loss"] < 1.9
