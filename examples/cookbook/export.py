"""Export: safetensors for other programs, and a program that runs without phalanx and without the source.

``trainer.export`` writes the weights. ``torch.export`` records the forward pass of a plain network inside the module;
for ONNX or TorchScript give the same network to ``torch.onnx.export`` or ``torch.jit.trace``. The check: both have the
same outputs after they are read back.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from tasks import NO_FILES, DigitClassifier, digit_loaders, digits, recipe_options
from torch import nn

from phalanx import Trainer, seed_everything


def main() -> None:
    options = recipe_options(__doc__)
    seed_everything(1)
    module = DigitClassifier()
    trainer = Trainer(max_epochs=1 if options.short else 10, **NO_FILES)
    trainer.fit(module, *digit_loaders())
    images = digits().tensors[0][:100]
    expected = module(images)

    Path(options.out).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        weights = trainer.export(Path(folder) / "digits.safetensors")
        fresh = DigitClassifier()
        fresh.load_state_dict(load_file(weights))
        assert torch.equal(fresh(images), expected)

        network = nn.Sequential(module.backbone, module.head).eval()
        batch = torch.export.Dim("batch")
        program = torch.export.export(network, (images[:2],), dynamic_shapes=({0: batch},))
        torch.export.save(program, Path(folder) / "digits.pt2")
        loaded = torch.export.load(Path(folder) / "digits.pt2").module()
        torch.testing.assert_close(loaded(images), expected)
        sizes = {path.name: path.stat().st_size for path in sorted(Path(folder).iterdir())}
    print(f"the same outputs from each of: {', '.join(f'{name} ({size} bytes)' for name, size in sizes.items())}")


if __name__ == "__main__":
    main()
