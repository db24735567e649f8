"""A module and a script written for PyTorch Lightning, ported to phalanx by changing names.

    python examples/lightning_port.py
    python examples/lightning_port.py --strategy ddp --devices 2

The code is in Lightning's style: ``save_hyperparameters``, ``self.log`` with ``prog_bar``, ``on_epoch`` and
``sync_dist``, a dict from ``configure_optimizers``, hooks, a ``DataModule``, callbacks. These names were changed:

    import lightning as L                                ->  from phalanx import DataModule, Trainer, TrainModule
    from lightning.pytorch.callbacks import ...          ->  from phalanx.callbacks import ...
    class Autoencoder(L.LightningModule)                 ->  class Autoencoder(TrainModule)
    class DigitsData(L.LightningDataModule)              ->  class DigitsData(DataModule)
    L.Trainer(...), L.seed_everything(...)               ->  Trainer(...), seed_everything(...)

The model is an autoencoder that compresses scikit-learn's digits, 64 pixels each, to a few numbers. Requires
scikit-learn: ``pip install -c constraints.txt '.[examples]'``.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, random_split

from phalanx import Callback, DataModule, Trainer, TrainModule, seed_everything
from phalanx.callbacks import EarlyStopping, GradientAccumulationScheduler, LearningRateMonitor, ModelCheckpoint


class Autoencoder(TrainModule):
    def __init__(self, hidden: int = 128, code: int = 8, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def forward(self, images: Tensor) -> Tensor:
        decoded: Tensor = self.decoder(self.encoder(images))
        return decoded

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = self._error(batch)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._error(batch), prog_bar=True, on_epoch=True, sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log_dict({"test_loss": self._error(batch)}, sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        codes: Tensor = self.encoder(batch[0])
        return codes

    def on_train_epoch_end(self) -> None:
        self.log("learning_rate", self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss", "interval": "epoch", "frequency": 1},
        }

    def _error(self, batch: list[Tensor]) -> Tensor:
        images = batch[0]
        return nn.functional.mse_loss(self(images), images)


class DigitsData(DataModule):
    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def prepare_data(self) -> None:
        load_digits()  # downloads belong here: one rank of each machine calls this hook

    def setup(self, stage: str) -> None:
        images, _ = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16.0)
        generator = torch.Generator().manual_seed(0)
        self.training, self.validation, self.test = random_split(data, [0.7, 0.1, 0.2], generator)

    def train_dataloader(self) -> Any:
        return DataLoader(self.training, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.validation, batch_size=self.batch_size)

    def test_dataloader(self) -> Any:
        return DataLoader(self.test, batch_size=self.batch_size)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.test, batch_size=self.batch_size)


class LossHistory(Callback):
    """Records the validation losses, using Lightning's hooks and arguments."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if not trainer.sanity_checking:
            self.losses.append(float(trainer.callback_metrics["val_loss"]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a script written for Lightning.")
    parser.add_argument("--strategy", default="auto", help="how to distribute work over ranks, such as single or ddp")
    parser.add_argument("--devices", default="auto", help="number of ranks on this machine")
    parser.add_argument("--precision", default="32-true", help="such as 32-true or bf16-mixed")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--out", default="runs", help="directory for logs and checkpoints")
    parser.add_argument("--short", action="store_true", help="train for a few epochs only, as a quick check")
    options = parser.parse_args()

    seed_everything(42, workers=True)
    history = LossHistory()
    checkpoints = ModelCheckpoint(monitor="val_loss", mode="min", save_top_k=2, filename="{epoch}-{val_loss:.4f}")
    trainer = Trainer(
        accelerator="auto",
        strategy=options.strategy,
        devices=options.devices,
        precision=options.precision,
        max_epochs=3 if options.short else options.epochs,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        default_root_dir=options.out,
        callbacks=[
            EarlyStopping(monitor="val_loss", patience=6, mode="min"),
            GradientAccumulationScheduler({10: 2}),
            LearningRateMonitor(logging_interval="epoch"),
            checkpoints,
            history,
        ],
    )
    data = DigitsData()
    model = Autoencoder()
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(ckpt_path="best", datamodule=data)
    codes = trainer.predict(model, datamodule=data)

    # Every rank runs the script to its end, so print on one rank only.
    best = Autoencoder.load_from_checkpoint(checkpoints.best_model_path)
    if trainer.is_global_zero:
        assert codes is not None
        print(f"validation loss by epoch: {', '.join(f'{loss:.4f}' for loss in history.losses)}")
        print(f"test loss: {result['test_loss']:.4f}")
        print(f"{len(torch.cat(codes))} images of 64 pixels became {best.hparams.code} numbers each")
        print(f"best checkpoint: {checkpoints.best_model_path}")
        print(f"logs: {trainer.log_dir}")


if __name__ == "__main__":
    main()
