"""Classify handwritten digits by a loop of your own, on any strategy. Start with ``python train.py``."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Fabric


def train(fabric: Fabric, epochs: int = 10, width: int = 128) -> float:
    """Train and save a model; return its accuracy on the images that it was not trained on."""
    fabric.launch()
    fabric.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    known, unseen = torch.utils.data.random_split(data, [1500, 297])
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    loader, test = fabric.setup_dataloaders(DataLoader(known, 32, shuffle=True), DataLoader(unseen, 64))
    for epoch in range(epochs):
        for batch, targets in loader:
            loss = nn.functional.cross_entropy(model(batch), targets)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        fabric.print(f"epoch {epoch}: loss {loss.item():.3f}")
    model.eval()
    with torch.no_grad():
        correct = torch.cat([fabric.gather_for_metrics(model(x).argmax(dim=1) == y) for x, y in test])
    fabric.save("digits.ckpt", {"model": model, "optimizer": optimizer, "epoch": epochs})
    return correct.float().mean().item()


if __name__ == "__main__":
    fabric = Fabric()
    fabric.print(f"accuracy on unseen images: {train(fabric):.1%}, saved as digits.ckpt")
