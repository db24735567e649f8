"""Profiling: the share of time that a fit spends on data, forward, backward and the optimizer.

``SimpleProfiler`` measures the sections of every fit; ``trainer.profiler.profile("name")`` adds one of your own. The
checks: loading a data set that is slow on purpose takes longer than augmenting it, and the shares add up to 1.
"""

from __future__ import annotations

import time
from typing import Any

from tasks import NO_FILES, DigitClassifier, digits, recipe_options
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from phalanx import Trainer, seed_everything
from phalanx.profilers import SimpleProfiler


class SlowDigits(Dataset[Any]):
    """The digits, with a pause before each image as a disk or a decoder would need."""

    def __init__(self) -> None:
        self.data = digits()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return self.data[index]


class Augmented(DigitClassifier):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        with self.trainer.profiler.profile("augment"):
            images = images + 0.1 * images.new_empty(images.shape).normal_()
        return super().training_step([images, labels], batch_idx)


def main() -> None:
    options = recipe_options(__doc__)
    seed_everything(1)
    profiler = SimpleProfiler()
    loader: Any = DataLoader(SlowDigits(), batch_size=32, shuffle=True)
    trainer = Trainer(max_steps=8 if options.short else 56, profiler=profiler, **NO_FILES)
    trainer.fit(Augmented(), loader)
    shares = profiler.shares()
    print(", ".join(f"{name} {share:.1%}" for name, share in sorted(shares.items(), key=lambda item: -item[1])[:5]))
    assert abs(sum(shares.values()) - 1.0) < 1e-6
    assert shares["data"] > shares["augment"] > 0.0


if __name__ == "__main__":
    main()
