"""Mixed precision: bf16 for the matrix products, fp32 for the weights.

``precision="bf16-mixed"`` needs no other change. ``"fp8-mixed"`` does the same with fp8 in linear layers, on GPUs that
have it and with torchao installed. The check: the outputs are bf16, the weights stay fp32, and the loss stays close.
"""

from __future__ import annotations

import torch
from tasks import NO_FILES, DigitClassifier, digit_loaders, recipe_options
from torch import Tensor

from phalanx import Trainer, seed_everything


class Recording(DigitClassifier):
    """Records the dtypes of the outputs of a step and of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[tuple[torch.dtype, torch.dtype]] = set()

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        if self.training:
            self.dtypes.add((logits.dtype, self.head.weight.dtype))
        return logits


def fit(precision: str, epochs: int) -> tuple[float, set[tuple[torch.dtype, torch.dtype]]]:
    """Return the validation loss and the recorded dtypes."""
    seed_everything(1)
    module = Recording()
    trainer = Trainer(precision=precision, max_epochs=epochs, **NO_FILES)
    trainer.fit(module, *digit_loaders())
    return float(trainer.callback_metrics["val_loss"]), module.dtypes


def main() -> None:
    options = recipe_options(__doc__)
    epochs = 3 if options.short else 20
    full, full_dtypes = fit("32-true", epochs)
    mixed, mixed_dtypes = fit("bf16-mixed", epochs)
    print(f"validation loss {full:.4f} in fp32, {mixed:.4f} in bf16-mixed")
    assert full_dtypes == {(torch.float32, torch.float32)}
    assert mixed_dtypes == {(torch.bfloat16, torch.float32)}
    assert full != mixed
    assert abs(full - mixed) < 0.05 * full


if __name__ == "__main__":
    main()
