"""Both networks are trained, and the drawings change. Start with ``pytest``."""

from pathlib import Path

import torch
from train import GAN, Digits

from phalanx import Trainer, seed_everything


def test_the_drawings_become_darker_where_digits_are_dark(tmp_path: Path) -> None:
    seed_everything(0)
    model, digits = GAN(), torch.cat([batch[0] for batch in Digits().train_dataloader()]).mean(dim=0)
    noise = torch.randn(256, 64)
    with torch.no_grad():
        before = (model.generator(noise).mean(dim=0) - digits).abs().mean()
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=4, default_root_dir=tmp_path)
    trainer.fit(model, datamodule=Digits())
    with torch.no_grad():
        after = (model.generator(noise).mean(dim=0) - digits).abs().mean()
    assert after < before / 2
