"""Reinforcement learning (GRPO): a language model learns from a reward that a program computes.

Group relative policy optimization (Shao et al. 2024): answers that are better than the mean of their group become more
likely, within a clipped ratio and near a frozen reference. Every rank generates for prompts of its own, also while the
weights are sharded, and ``RowSampling`` makes an answer depend on its number and the weights alone. A prompt is a sum
of two digits, and the reward is the share of the answer's tokens that are the result. The check: the reward rises.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from typing import Any

import torch
from tasks import NO_FILES, log_probabilities, recipe_options, tiny_llama
from torch import Tensor
from torch.utils.data import DataLoader

from phalanx import Trainer, TrainModule, seed_everything
from phalanx.hf import RowSampling

SEED, PROMPT, ANSWER = 1, 4, 3
GROUP, UPDATES, CLIP, BETA = 8, 2, 0.2, 0.01


class Policy(TrainModule):
    """Generates, and makes several updates with what it has generated."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama(vocabulary=12)
        self.reference = copy.deepcopy(self.model).requires_grad_(False)

    def rollouts(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Return texts ``[samples * group, length]`` for samples by number, and rewards ``[samples, group]``."""
        first, second = (samples % 5).repeat_interleave(GROUP), (samples // 5 % 5).repeat_interleave(GROUP)
        prompts = torch.stack([first, 0 * first + 10, second, 0 * first + 11], 1)  # tokens 0 to 9 are digits
        noise = RowSampling([(SEED, int(sample), answer) for sample in samples for answer in range(GROUP)])
        given = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "logits_processor": [noise]}
        texts = self.model.generate(prompts, max_new_tokens=ANSWER, **given)
        right = texts[:, PROMPT:] == (first + second).unsqueeze(1)
        return texts, right.float().mean(1).view(-1, GROUP)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        texts, rewards = self.rollouts(batch)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        with torch.no_grad():
            old, reference = (log_probabilities(one, texts, PROMPT) for one in (self.model, self.reference))
        optimizer: Any = self.optimizers()
        for _ in range(UPDATES):
            new = log_probabilities(self.model, texts, PROMPT)
            ratio = (new - old).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            divergence = (reference - new).exp() - (reference - new) - 1
            loss = (BETA * divergence - gain).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log_dict({"loss": loss, "reward": rewards.mean(), "divergence": divergence.mean()}, prog_bar=True)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_reward", self.rollouts(batch)[1].mean(), batch_size=len(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=2e-3)


def prepare(options: Namespace, batches: int, **settings: Any) -> tuple[Trainer, Policy, list[Any]]:
    """Return a Trainer, a module, and the loaders: of numbers of samples, from which everything random follows."""
    seed_everything(SEED)
    trainer = Trainer(strategy=options.strategy, devices=options.devices, max_epochs=1, **settings)
    loaders: Any = [(torch.arange(batches * 8), 8 // options.devices), (torch.arange(25), 25)]
    return trainer, Policy(), [DataLoader(*each) for each in loaders]


def main() -> None:
    options = recipe_options(__doc__, ranks=True)
    trainer, module, loaders = prepare(options, batches=60 if options.short else 200, **NO_FILES)
    [before] = trainer.validate(module, loaders[1], verbose=False)
    trainer.fit(module, *loaders)
    after = float(trainer.callback_metrics["val_reward"])
    trainer.print(f"reward {before['val_reward']:.2f} before, {after:.2f} after training")
    assert after > before["val_reward"] + 0.1


if __name__ == "__main__":
    main()
