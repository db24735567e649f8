"""Sampling by random numbers of each row, so that texts do not depend on the batch or on the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.arguments import names_arguments
from ..core.errors import ConfigurationError, DataError
from ..core.position_rng import mix_seed


class RowSampling:
    """Samples each row of a batch in ``generate`` by a random stream of its own.

    The text of a row depends on its prompt, its seed and the weights alone: not on the other rows of the batch, on the
    rank that generates it or on what was generated before, so that a resumed fit samples what one without a stop does.
    Pass it to ``generate`` of a model of transformers with ``do_sample=False``: it adds noise to the logits, of which
    the largest is then a sample of the softmax (the Gumbel-max trick)::

        seeds = [(seed, step, sample) for sample in samples]
        model.generate(prompts, do_sample=False, logits_processor=[RowSampling(seeds)])

    Args:
        seeds: one for each row: a number, or several that give one seed. With ``num_return_sequences=n``, each prompt
            has n rows, one after the other.
        temperature: the logits are divided by it.

    Raises:
        ConfigurationError: the temperature is not above zero.
    """

    @names_arguments
    def __init__(self, seeds: Sequence[int | Sequence[int]], temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ConfigurationError(
                f"RowSampling(temperature={temperature!r}): it must be above zero. For the most likely token leave "
                "RowSampling out."
            )
        parts = [[one] if isinstance(one, int) else one for one in seeds]
        self._generators = [torch.Generator().manual_seed(mix_seed(*one)) for one in parts]
        self._temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the logits ``[rows, vocabulary]`` with noise.

        Raises:
            DataError: there is another number of rows than of seeds.
        """
        if scores.shape[0] != len(self._generators):
            raise DataError(
                f"RowSampling has {len(self._generators)} seeds, and generate has {scores.shape[0]} rows: give a seed "
                "for each prompt and each of its num_return_sequences."
            )
        # On the CPU, so that devices of all kinds draw the same numbers.
        noise = [torch.empty(scores.shape[1]).exponential_(generator=each).log_() for each in self._generators]
        return scores / self._temperature - torch.stack(noise).to(scores)
