"""The classifier learns in three epochs. Start with ``pytest``."""

from pathlib import Path

from train import Classifier, Digits

from phalanx import Trainer, seed_everything


def test_most_digits_are_recognized(tmp_path: Path) -> None:
    seed_everything(0)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=3, default_root_dir=tmp_path)
    trainer.fit(Classifier(), datamodule=Digits())
    assert trainer.callback_metrics["val/accuracy"] > 0.85
