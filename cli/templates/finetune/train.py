"""Fine-tune features of handwritten digits: first a new head alone, and from the third epoch on the whole model."""

import torch
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import DataModule, Trainer, TrainModule
from phalanx.callbacks import BackboneFinetuning


class Digits(DataModule):
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        images, labels = load_digits(return_X_y=True)
        return DataLoader(TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels)), 32, shuffle=True)


class FineTuned(TrainModule):
    def __init__(self, features: int = 32) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(64, features), nn.Linear(features, 10)
        # The principal components of the images stand for pretrained weights: load your own into a backbone of yours.
        components = PCA(features, random_state=0).fit(load_digits().data).components_
        self.backbone.load_state_dict({"weight": torch.tensor(components), "bias": torch.zeros(features)})

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.head(self.backbone(batch[0]).relu()), batch[1])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # The callback adds the parameters of the backbone when it unfreezes them.
        return torch.optim.AdamW((each for each in self.parameters() if each.requires_grad), lr=1e-2)


if __name__ == "__main__":
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=2)
    Trainer(max_epochs=6, log_every_n_steps=10, callbacks=callback).fit(FineTuned(), datamodule=Digits())
