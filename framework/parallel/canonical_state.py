"""The canonical state of a module and its optimizers: what a checkpoint holds, independent of the strategy.

Canonical state has the names, shapes and dtypes that a single process would save. A strategy that holds parts of the
state on each rank returns these parts as shards of the full tensors, so every strategy can load what another has saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.reader import StoredTensors
from ..checkpoint.write_plan import Shard
from ..core.arguments import NoArguments
from ..core.optimizer_config import parameters_of
from ..core.quantized_state import join_slots, split_slots
from .parameter_names import state_tensors

Slots = Mapping[str, Any]
"""The optimizer state of one parameter by slot (``"exp_avg"``, ``"step"``): ``Shard`` when saved, ``StoredTensor`` when
loaded; numbers and 0-d tensors are stored directly."""


class CanonicalState(NoArguments):
    """Saves and loads canonical state where every rank holds the full tensors; base class for other layouts.

    Methods marked "Collective" must be called by all ranks in the same order.
    """

    def shapes(self, module: nn.Module) -> dict[str, tuple[int, ...]]:
        """Return the full shape of every tensor in a module's canonical state, by parameter and buffer name."""
        return {name: tuple(tensor.shape) for name, tensor in state_tensors(module).items()}

    def model_state(self, module: nn.Module) -> dict[str, Shard]:
        """Return this rank's part of a module's canonical state, by parameter and buffer name. Collective.

        Parameters have the dtype in which updates are applied: the fp32 copy if there is one.
        """
        return {name: Shard.whole(tensor.detach()) for name, tensor in state_tensors(module).items()}

    def load_model_state(self, module: nn.Module, tensors: StoredTensors) -> None:
        """Load canonical state; tensors missing from ``tensors`` are unchanged. Collective.

        Args:
            module: the module that was set up.
            tensors: by the names of ``shapes``, in the full shapes; values are cast to the module's dtypes.

        Raises:
            KeyError: a name is not one of ``shapes``.
        """
        own = state_tensors(module)
        with torch.no_grad():
            for name, stored in tensors.items():
                own[name].copy_(stored.read())

    def optimizer_state(self, optimizer: Optimizer) -> Iterator[tuple[Tensor, Slots]]:
        """Yield pairs of a parameter that has state (the object in ``param_groups``) and its slots. Collective.

        Tensors of at least one dim are ``Shard`` objects: this rank's part of a tensor of the parameter's full shape.
        Quantized state is split into plain tensors, see ``core/quantized_state.py``.
        """
        for parameter in parameters_of(optimizer):
            slots = optimizer.state.get(parameter)
            if slots:
                yield parameter, {slot: shard_if_tensor(value) for slot, value in split_slots(slots).items()}

    def stepping_optimizer(self, optimizer: Optimizer) -> Optimizer | None:
        """Return the optimizer whose ``step`` alone changes the tensors of ``optimizer_state``; None if not known.

        With an optimizer, an asynchronous save may defer copying them; ``step`` waits for it. With None it copies at
        once.
        """
        return optimizer

    def reduction_order(self) -> list[Tensor]:
        """Return the parameters in the order in which gradients are reduced; empty if it is always the same.

        On three ranks or more the order affects how sums are rounded. An order that a step has determined is saved, so
        that a resumed run rounds as the saved one.
        """
        return []

    def use_reduction_order(self, order: Sequence[Tensor]) -> None:
        """Reduce gradients in an order that ``reduction_order`` returned, if it holds the same parameters."""

    def load_optimizer_state(self, optimizer: Optimizer, state: Sequence[Slots], groups: list[dict[str, Any]]) -> None:
        """Load the state of every parameter, in the order of ``parameters_of``, and hyperparameters. Collective.

        Args:
            optimizer: the user's optimizer.
            state: one mapping for each parameter, empty for one without state.
            groups: hyperparameters of each group, all keys except ``"params"``.
        """
        own = [join_slots({slot: whole_of(value) for slot, value in slots.items()}) for slots in state]
        optimizer.load_state_dict(torch_state_dict(optimizer, own, groups))


def shard_if_tensor(value: Any) -> Any:
    """Wrap a tensor with dims in a ``Shard`` that covers it; return other values unchanged."""
    return Shard.whole(value) if isinstance(value, Tensor) and value.dim() > 0 else value


def whole_of(value: Any) -> Any:
    """Read the tensor of a ``StoredTensor``; return other values unchanged."""
    return value.read() if is_stored(value) else value


def is_stored(value: Any) -> bool:
    """Whether a slot's value is a tensor that has not been read yet."""
    return not isinstance(value, Tensor) and hasattr(value, "read_slice")


def torch_state_dict(
    optimizer: Optimizer, state: Sequence[Slots], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the dict for ``Optimizer.load_state_dict``, parameters numbered in group order.

    Args:
        optimizer: the optimizer that will load it.
        state: one mapping for each parameter, empty for one without state.
        groups: hyperparameters of each group, all keys except ``"params"``.
    """
    numbers = iter(range(len(parameters_of(optimizer))))
    own = [
        {**group, "params": [next(numbers) for _ in current["params"]]}
        for group, current in zip(groups, optimizer.param_groups, strict=True)
    ]
    return {"state": {number: dict(slots) for number, slots in enumerate(state) if slots}, "param_groups": own}
