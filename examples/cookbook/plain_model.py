"""Plain model: load a checkpoint into a torch module, in a program that does not train.

``phalanx.checkpoint.weights`` reads the weights of any checkpoint by parameter name, under whatever strategy it was
saved, and verifies their checksums. The check: the plain module predicts the same, and a damaged file is refused.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tasks import DigitClassifier, digit_loaders, digits, recipe_options
from torch import nn

from phalanx import Trainer, checkpoint, seed_everything
from phalanx.callbacks import ModelCheckpoint
from phalanx.errors import CheckpointError


def plain_network(path: str) -> nn.Sequential:
    """Return the network of a checkpoint as a plain torch module."""
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    weights = checkpoint.weights(path)
    names = {"backbone.0": "0", "head": "2"}
    network.load_state_dict(
        {f"{names[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": tensor for name, tensor in weights.items()}
    )
    return network


def main() -> None:
    options = recipe_options(__doc__)
    seed_everything(1)
    module = DigitClassifier()
    saver = ModelCheckpoint()
    trainer = Trainer(
        max_epochs=1 if options.short else 10,
        default_root_dir=options.out,
        logger=False,
        callbacks=[saver],
        verbose=False,
    )
    trainer.fit(module, *digit_loaders())
    path = str(saver.best_model_path)

    images = digits().tensors[0]
    assert torch.equal(plain_network(path)(images), module(images))

    file = next(Path(path).glob("model*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    try:
        plain_network(path)
    except CheckpointError as error:
        print(f"a flipped bit is found: {error}")
    else:
        raise AssertionError("the damage was not found")


if __name__ == "__main__":
    main()
