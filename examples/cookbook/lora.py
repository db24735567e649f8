"""LoRA: train a small adapter beside frozen weights.

An adapter adds the product of two thin matrices to the output of a linear layer. A model that has seen the even digits
learns the odd ones with it. The checks: the base stays as it is, bit for bit, few parameters are trained, and the
adapters merged into the weights give the same outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tasks import NO_FILES, DigitClassifier, digit_loaders, digits, recipe_options
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Trainer, seed_everything


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of a low rank."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # the adapted model begins as the base

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.base(inputs) + self.up(self.down(inputs))
        return outputs

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Return one linear layer with the same outputs."""
        layer = nn.Linear(self.base.in_features, self.base.out_features)
        layer.weight.copy_(self.base.weight + self.up.weight @ self.down.weight)
        layer.bias.copy_(self.base.bias)
        return layer


def replace_layers(module: nn.Module, kind: type[nn.Module], replacement: Callable[[Any], nn.Module]) -> None:
    """Replace each layer of a class in a module."""
    for name, child in list(module.named_children()):
        if isinstance(child, kind):
            setattr(module, name, replacement(child))
        else:
            replace_layers(child, kind, replacement)


def main() -> None:
    options = recipe_options(__doc__)
    seed_everything(1)
    images, labels = digits().tensors
    even = TensorDataset(images[labels % 2 == 0], labels[labels % 2 == 0])
    module = DigitClassifier(width=256)
    Trainer(max_epochs=5, **NO_FILES).fit(module, DataLoader(even, batch_size=32, shuffle=True))

    adapted = DigitClassifier(width=256, learning_rate=1e-2)
    adapted.load_state_dict(module.state_dict())
    replace_layers(adapted, nn.Linear, lambda layer: Adapted(layer, rank=4))
    training, validation = digit_loaders()
    [before] = Trainer(**NO_FILES).validate(adapted, validation, verbose=False)
    trainer = Trainer(max_epochs=5 if options.short else 20, **NO_FILES)
    trainer.fit(adapted, training, validation)
    after = float(trainer.callback_metrics["val_accuracy"])

    trained = sum(each.numel() for each in adapted.parameters() if each.requires_grad)
    total = sum(each.numel() for each in adapted.parameters())
    print(
        f"accuracy {before['val_accuracy']:.3f} before, {after:.3f} after training {trained:,} of {total:,} parameters"
    )
    assert after > before["val_accuracy"] + 0.2
    assert trained < total / 6
    layers = {name.replace(".base", ""): value for name, value in adapted.state_dict().items()}
    assert all(torch.equal(value, layers[name]) for name, value in module.state_dict().items())
    expected = adapted(images)
    replace_layers(adapted, Adapted, Adapted.merged)
    assert adapted.state_dict().keys() == module.state_dict().keys()
    torch.testing.assert_close(adapted(images), expected, atol=1e-4, rtol=1e-4)


if __name__ == "__main__":
    main()
