"""``SwitchedWeights``: optimizers that train other weights than those to evaluate, such as schedule-free ones.

Such an optimizer has the methods ``train`` and ``eval``, which replace the weights in the module. A fit calls them, and
keeps a copy of the weights of training meanwhile, as going back and forth would round them. Checkpoints hold the
weights to evaluate as those of the model, and the weights of training as an average named ``"training"``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..checkpoint.reader import HeldShard, StoredTensors
from ..checkpoint.write_plan import Shard
from ..core.optimizer_config import parameters_of, switches_weights
from ..core.split_optimizer import optimizers_in
from ..parallel.parameter_names import canonical_names
from ..parallel.strategy import Strategy
from .module_state import model_state, put_model

KEY = "training"
"""The name of the weights of training in a checkpoint's section of averages."""


class SwitchedWeights:
    """The weights of the optimizers of a fit that switch them between training and evaluation.

    Args:
        module: the module that is trained.
        strategy: its strategy.
        optimizers: its optimizers, after ``Strategy.setup``; from now on they train.
    """

    def __init__(self, module: nn.Module, strategy: Strategy, optimizers: Sequence[Optimizer]) -> None:
        self._module = module
        self._strategy = strategy
        parts = [part for optimizer in optimizers for part in optimizers_in(optimizer)]
        self._parts: list[Any] = [part for part in parts if switches_weights(part)]
        self._training: dict[str, Shard] | None = None
        for part in self._parts:
            part.train()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def swap_in(self) -> None:
        """Put the weights to evaluate into the module, and keep those of training."""
        # Strategies that gather parameters free them here, so that the optimizers change what is gathered next.
        self._training = {name: _copied(shard) for name, shard in self._live().items()}
        for part in self._parts:
            part.eval()

    def swap_out(self) -> None:
        """Put the weights of training back, bit by bit."""
        if self._training is None:
            return
        for part in self._parts:
            part.train()
        self._load({name: HeldShard(shard) for name, shard in self._training.items()})
        self._training = None

    def to_evaluate(self, state: Mapping[str, Shard]) -> dict[str, Shard]:
        """Return a module's canonical state with copies of the weights to evaluate."""
        if not self._parts:
            return dict(state)
        trains = self._training is None
        if trains:
            self.swap_in()
        found = {name: _copied(shard) for name, shard in self._live().items()}
        if trains:
            self.swap_out()
        return {**state, **found}

    def shards(self) -> dict[str, Shard]:
        """Return this rank's part of the weights of training, as a checkpoint's section of averages holds it."""
        if not self._parts:
            return {}
        found = self._live() if self._training is None else self._training
        return {f"{KEY}/{name}": shard for name, shard in found.items()}

    def load(self, tensors: StoredTensors) -> None:
        """Load the weights of training, after the model and the optimizers were loaded.

        Args:
            tensors: by the module's names; empty for a checkpoint that was saved without them.
        """
        # The optimizers may have been saved in either mode; what `train` makes of the weights is replaced.
        for part in self._parts:
            part.train()
        self._load(tensors)

    def _load(self, tensors: StoredTensors) -> None:
        put_model(self._strategy, self._module, tensors)

    def _live(self) -> dict[str, Shard]:
        """Return this rank's part of the parameters that the optimizers update, by canonical name."""
        canonical = canonical_names(self._module)
        chosen = {id(parameter) for part in self._parts for parameter in parameters_of(part)}
        named = self._module.named_parameters(remove_duplicate=False)
        names = [canonical(name) for name, parameter in named if id(parameter) in chosen]
        state = model_state(self._strategy, self._module)
        return {name: state[name] for name in names if name in state}


def _copied(shard: Shard) -> Shard:
    return replace(shard, tensor=shard.tensor.clone())
