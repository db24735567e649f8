"""Custom loop: train with Fabric, and write the steps yourself.

``Fabric`` places the model, shards the data and applies precision and strategy; the loop stays yours. Run it on two
ranks with ``--devices 2``. The check: the accuracy on images that the model has not seen.
"""

from __future__ import annotations

import argparse

import torch
from tasks import DigitClassifier, digit_loaders
from torch import nn

from phalanx import Fabric


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with Fabric.")
    parser.add_argument("--devices", type=int, default=1, help="number of ranks on this machine")
    parser.add_argument("--out", default="runs", help="directory for the checkpoint")
    parser.add_argument("--short", action="store_true", help="train for a moment only, as a quick check")
    options = parser.parse_args()

    fabric = Fabric(devices=options.devices, precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(1)
    plain = DigitClassifier()
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3))
    training, validation = fabric.setup_dataloaders(*digit_loaders(batch_size=32))

    for _ in range(4 if options.short else 20):
        for images, labels in training:
            loss = nn.functional.cross_entropy(model(images), labels)
            # The weight is the number of items that the mean is over: exact with uneven last batches, too.
            fabric.backward(loss, weight=len(images))
            optimizer.step()
            optimizer.zero_grad()

    model.eval()
    hits = []
    for images, labels in validation:
        with torch.no_grad():
            hits.append(fabric.gather_for_metrics(model(images).argmax(dim=1) == labels))
    accuracy = torch.cat(hits).float().mean().item()
    fabric.save(f"{options.out}/custom_loop.ckpt", {"model": model, "optimizer": optimizer})
    fabric.print(f"accuracy {accuracy:.3f} on {len(torch.cat(hits))} images")
    assert accuracy > 0.8
    assert len(torch.cat(hits)) == 297


if __name__ == "__main__":
    main()
