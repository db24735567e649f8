"""The model learns in twenty steps. Start with ``pytest``."""

from pathlib import Path

from train import LanguageModel, Source

from phalanx import Trainer, seed_everything


def test_the_loss_falls_below_that_of_a_guess(tmp_path: Path) -> None:
    seed_everything(0)
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=20, log_every_n_steps=1, default_root_dir=tmp_path)
    trainer.fit(LanguageModel(width=64, layers=1), datamodule=Source())
    # At first, all 256 bytes are equally likely: a loss of log(256) = 5.5.
    assert trainer.callback_metrics["train/loss"] < 4.5
