"""A model of transformers: fine-tune it on batches of its data collators, and generate text in validation.

``TransformersModule`` weights batches by the tokens that count, and ``generate`` works under every strategy, also where
the weights are sharded. The checks: the perplexity falls, and the text continues the prompts.
"""

from __future__ import annotations

from typing import Any

import torch
from tasks import NO_FILES, recipe_options, standard_library
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, default_data_collator

from phalanx import Trainer, seed_everything
from phalanx.hf import TransformersModule

LENGTH = 64


class Writer(TransformersModule):
    """Continues a prompt after each validation."""

    text = ""

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        prompt = torch.tensor([list(b"def ")], device=self.device)
        found: Tensor = self.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24)
        self.text = bytes(found[0].tolist()).decode(errors="replace")


def main() -> None:
    options = recipe_options(__doc__)
    seed_everything(1)
    source = "".join(standard_library(num_files=4)).encode("ascii", "replace")
    rows = [list(source[start : start + LENGTH]) for start in range(0, len(source) - LENGTH, LENGTH)]
    samples: Any = [{"input_ids": row, "labels": row} for row in rows[: 160 if options.short else 3200]]
    # For weights that exist, give the folder that save_pretrained wrote instead.
    sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    module = Writer(LlamaConfig(**sizes, num_attention_heads=4, pad_token_id=0), learning_rate=3e-3)
    loader = DataLoader(samples, batch_size=16, collate_fn=default_data_collator, shuffle=True)
    trainer = Trainer(max_epochs=2 if options.short else 5, **NO_FILES)
    before = trainer.validate(module, loader, verbose=False)[0]["val_perplexity"]
    trainer.fit(module, loader, loader)
    after = float(trainer.callback_metrics["val_perplexity"])
    print(f"perplexity {before:.0f} before, {after:.0f} after; {module.text!r}")
    assert after < before / 2
    assert module.text.startswith("def ")
    assert len(module.text) > 4


if __name__ == "__main__":
    main()
