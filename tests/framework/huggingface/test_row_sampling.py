"""Texts sampled by a seed of each row do not depend on the batch, on the rank or on the strategy."""

from __future__ import annotations

from typing import Any

import torch
from hugging_face import causal
from messages import refuses
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import TrainModule
from phalanx.framework.core.errors import ConfigurationError, DataError
from phalanx.framework.core.position_rng import mix_seed
from phalanx.hf import RowSampling

PROMPTS = torch.tensor([[5, 6], [7, 8], [5, 6], [9, 3]])
TOKENS = 6


def sampled(model: Any, rows: Tensor, seeds: list[Any]) -> list[list[int]]:
    noise = RowSampling(seeds, temperature=1.5)
    given = {"attention_mask": torch.ones_like(rows), "eos_token_id": None, "do_sample": False}
    found: Tensor = model.generate(rows, max_new_tokens=TOKENS, logits_processor=[noise], **given)
    return found.tolist()


@torch.no_grad()
def by_hand(model: nn.Module, prompt: Tensor, seed: int) -> list[int]:
    """Sample token by token from the softmax of the logits, by the largest of ``probability / exponential``."""
    generator, tokens = torch.Generator().manual_seed(mix_seed(seed)), prompt.tolist()
    for _ in range(TOKENS):
        shares = (model(torch.tensor([tokens])).logits[0, -1] / 1.5).softmax(-1)
        tokens.append(int((shares / torch.empty_like(shares).exponential_(generator=generator)).argmax()))
    return tokens


def test_a_row_is_a_sample_by_its_own_seed_in_any_batch() -> None:
    model = causal().eval()
    whole = sampled(model, PROMPTS, [3, 4, 5, 6])
    assert whole == [by_hand(model, prompt, seed) for prompt, seed in zip(PROMPTS, (3, 4, 5, 6), strict=True)]
    assert whole[0] != whole[2], "the same prompt with another seed"
    assert sampled(model, PROMPTS[[3, 0]], [6, 3]) == [whole[3], whole[0]]


class Sampler(TrainModule):
    """Samples the prompts of a rank, in each validation step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = causal()
        self.texts: dict[int, list[int]] = {}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        texts = sampled(self.model, PROMPTS[batch], [(1, int(each)) for each in batch])
        self.texts |= dict(zip(batch.tolist(), texts, strict=True))


def texts_of(strategy: str) -> dict[int, list[int]]:
    module, trainer = Sampler(), silent_trainer(devices="auto", strategy=strategy)
    numbers: Any = torch.arange(len(PROMPTS))
    trainer.validate(module, DataLoader(numbers, 2 // trainer.world_size), verbose=False)
    return module.texts


def test_ranks_sample_what_one_process_does() -> None:
    expected = texts_of("single")
    first, second = run_on_ranks(2, texts_of, "fsdp")
    assert first | second == expected
    assert len(first) < len(expected)


def test_shares_of_tokens_are_those_of_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    sampling = RowSampling(range(2000), temperature=2.0)
    found = sampling(torch.zeros(2000, 1), logits.expand(2000, 3)).argmax(1).bincount() / 2000
    # Three standard deviations of a share of 2000.
    torch.testing.assert_close(found, (logits / 2.0).softmax(0), rtol=0.0, atol=0.034)


def test_wrong_arguments_are_refused() -> None:
    with refuses(ConfigurationError, "temperature=0"):
        RowSampling([1], temperature=0)
    with refuses(DataError, "2 seeds", "4 rows"):
        sampled(causal(), PROMPTS, [1, 2])
