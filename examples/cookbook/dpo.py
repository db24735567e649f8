"""Preference tuning (DPO): a language model learns to prefer one answer over another.

Direct preference optimization (Rafailov et al. 2023) trains on two answers to each prompt. A frozen reference gives
each answer a log-probability: computed once, by ``predict``, or with ``--lora`` in each step, by the model with its
adapters disabled. Prompts are beginnings of lines of source code, and rejected answers have the words of the true ones
in another order. The checks: the loss begins at log 2, and held-out pairs are told apart.
"""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tasks import NO_FILES, PROMPT, log_probabilities, preference_pairs, recipe_options, tiny_llama
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from phalanx import Trainer, TrainModule, seed_everything

Batch = dict[str, Tensor]


class Preferences(TrainModule):
    """Trains on ``chosen`` and ``rejected``, tokens ``[batch, length]`` of a prompt and an answer, padded with 0."""

    def __init__(self, lora: bool = False, beta: float = 0.1) -> None:
        super().__init__()
        self.beta = beta
        self.save_frozen = not lora  # checkpoints hold the adapters, without the base
        self.model: Any = tiny_llama(vocabulary=128)
        if lora:
            self.model = get_peft_model(self.model, LoraConfig(r=16, target_modules="all-linear"))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the log-probability of each answer given its prompt, ``[batch, 2]``: chosen, rejected."""
        tokens = torch.cat([batch["chosen"], batch["rejected"]])
        found = log_probabilities(self.model, tokens, PROMPT) * (tokens[:, PROMPT:] != 0)
        return found.sum(1).view(2, -1).T

    def training_step(self, batch: Batch, batch_idx: int, stage: str = "train") -> Tensor:
        reference = batch.get("reference")
        if reference is None:
            with torch.no_grad(), self.model.disable_adapter():
                reference = self.predict_step(batch, batch_idx)
        chosen, rejected = (self.predict_step(batch, batch_idx) - reference).unbind(1)
        margin = self.beta * (chosen - rejected)
        loss = -functional.logsigmoid(margin).mean()
        values = {"loss": loss, "margin": margin.mean(), "accuracy": (margin > 0).float().mean()}
        self.log_dict({f"{stage}_{name}": value for name, value in values.items()}, batch_size=len(margin))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.training_step(batch, batch_idx, "val")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=2e-3)


def prepare(options: Namespace, **settings: Any) -> tuple[Trainer, Preferences, list[Any]]:
    """Return a Trainer, a module, and the loaders for training and validation."""
    seed_everything(1)
    module, data = Preferences(options.lora), preference_pairs(384)
    trainer = Trainer(strategy=options.strategy, devices=options.devices, **settings)
    if not options.lora:
        found: Any = trainer.predict(module, DataLoader(data, batch_size=64))  # type: ignore[arg-type]
        data = [{**one, "reference": row} for one, row in zip(data, torch.cat(found), strict=True)]
    training: Any = DataLoader(data[64:], 32 // options.devices, shuffle=True)  # type: ignore[arg-type]
    return trainer, module, [training, DataLoader(data[:64], 64)]  # type: ignore[arg-type]


def main() -> None:
    options = recipe_options(__doc__, ranks=True, lora="train adapters; the model without them is the reference")
    trainer, module, loaders = prepare(options, max_epochs=6 if options.short else 30, **NO_FILES)
    [before] = trainer.validate(module, loaders[1], verbose=False)
    trainer.fit(module, *loaders)
    after = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.print(f"loss {before['val_loss']:.3f} before, {after['val_loss']:.3f} after training")
    trainer.print(f"margin {after['val_margin']:.2f}, {after['val_accuracy']:.0%} of held-out pairs told apart")
    assert abs(before["val_loss"] - math.log(2)) < 1e-6
    assert after["val_accuracy"] > 0.8


if __name__ == "__main__":
    main()
