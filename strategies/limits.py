"""Checks of features that strategies with sharded gradients do not support, before torch fails in the first step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from ..framework.core.errors import ConfigurationError
from ..framework.core.optimizer_config import parameters_of
from ..framework.core.split_optimizer import optimizers_in
from ..framework.core.wording import a_type, counted

# With these the update of an element depends on others of its parameter.
_FULL_PARAMETERS = frozenset(
    {"Muon", "MuonWithAuxAdam", "SingleDeviceMuon", "SingleDeviceMuonWithAuxAdam", "Adafactor", "Shampoo", "SOAP"}
    | {"CAME", "LAMB", "Lamb", "LARS", "Lars", "AdaMuon", "NorMuon"}
)
# With these it depends on other parameters too, or on the sparsity of a gradient.
_ALL_PARAMETERS = frozenset({"LBFGS", "SparseAdam", "DistributedShampoo"})


def check_dense(module: nn.Module, strategy: str) -> None:
    """Refuse layers whose gradients are sparse tensors.

    Raises:
        ConfigurationError: the module has such a layer; the message names it.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise ConfigurationError(
                f"{name or 'the module'} is {a_type(part)}(sparse=True), and strategy={strategy!r} splits "
                "gradients, which sparse ones cannot be: leave sparse=True out, or use strategy='ddp'."
            )


def updates_full_parameters(optimizer: Optimizer) -> bool:
    """Whether an optimizer must be given full parameters, each of which it updates independently of the others.

    It is one of a known class, or has the attribute ``updates_full_parameters = True``.
    """
    return bool(_kinds(optimizer) & _FULL_PARAMETERS) or getattr(optimizer, "updates_full_parameters", False) is True


def updates_all_parameters(optimizer: Optimizer) -> bool:
    """Whether an optimizer must be given all of its parameters in full at once."""
    return bool(_kinds(optimizer) & _ALL_PARAMETERS)


def check_independent(optimizer: Optimizer, strategy: str) -> None:
    """Refuse optimizers that need all of their parameters in full.

    Raises:
        ConfigurationError: the optimizer, or one of a ``Split``, needs them.
    """
    for part in optimizers_in(optimizer):
        if updates_all_parameters(part):
            raise ConfigurationError(
                f"{type(part).__name__} needs full tensors, and strategy={strategy!r} leaves each rank a part of "
                "them: use an optimizer that updates each parameter independently, such as AdamW, or strategy='ddp'."
            )


class KnownParameters:
    """The parameters whose gradients a strategy averages, and the optimizers that may update no others.

    Args:
        module: a module that is set up.
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self._known: set[Tensor] = set(module.parameters())
        for optimizer in self.optimizers:
            self._known.update(parameters_of(optimizer))
        self._numbers: dict[Optimizer, int] = {}

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Record parameters that the strategy has taken over."""
        self._known.update(parameters)

    def check(self, optimizer: Optimizer) -> None:
        """Refuse parameters that an optimizer was given since the strategy has looked last.

        Raises:
            ConfigurationError: there are some; each rank would update its own copy by its own gradient.
        """
        groups = optimizer.param_groups
        number = len(groups[0]["params"]) if len(groups) == 1 else sum(len(group["params"]) for group in groups)
        if number == self._numbers.get(optimizer):
            return
        # Sharded parameters may belong to another module that the optimizer updates too.
        new = sum(each not in self._known and type(each) is nn.Parameter for each in parameters_of(optimizer))
        if new:
            raise ConfigurationError(
                f"{type(optimizer).__name__} was given {counted(new, 'parameter')} within an epoch, and ranks do not "
                "average their gradients yet: add layers with their parameter groups in on_train_epoch_start or "
                "earlier, in a Fabric before setup."
            )
        self._numbers[optimizer] = number


def _kinds(optimizer: Optimizer) -> set[str]:
    return {kind.__name__ for kind in type(optimizer).__mro__}
