"""``BaseFinetuning`` and ``BackboneFinetuning``: freeze parts of a model, and unfreeze them in a later epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from ..framework.api.callback import Callback
from ..framework.core.errors import ConfigurationError, is_count
from ..framework.core.norms import BatchNorm
from ..framework.core.optimizer_config import parameters_of, set_learning_rate
from ..framework.parallel.parameter_names import canonical_names

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule

Modules = nn.Module | Iterable[Any]
"""A module, or nested iterables of modules."""


class BaseFinetuning(Callback):
    """Base class for freezing parts of a model before training and unfreezing them later.

    Override ``freeze_before_training``, which is called before ``configure_optimizers``, and ``finetune_function``,
    which is called for each optimizer at the start of each epoch. ``configure_optimizers`` should pass only parameters
    that require gradients, as ``unfreeze_and_add_param_group`` adds the others in a group of their own.

    A resumed fit has the groups, the frozen parameters and the frozen batch norms of the checkpoint. An epoch that is
    resumed in its middle does not call ``finetune_function`` again.

    Raises:
        ConfigurationError: At the start of a fit; the strategy cannot unfreeze parameters after set-up.
    """

    collective = True

    _tuned_epoch: int | None = None
    """The last epoch for which ``finetune_function`` was called."""
    _frozen: tuple[list[str], list[str]] | None = None
    """The names of the frozen parameters, and of the batch norms that do not track statistics."""
    _restored = False

    def freeze_before_training(self, module: TrainModule) -> None:
        """Freeze parts of the module with ``freeze``, before ``configure_optimizers`` is called."""
        raise NotImplementedError(f"{type(self).__name__} does not override freeze_before_training.")

    def finetune_function(self, module: TrainModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze parts of the module at the start of an epoch, with ``unfreeze_and_add_param_group``."""
        raise NotImplementedError(f"{type(self).__name__} does not override finetune_function.")

    # ---- for use in these two methods -------------------------------------------------------------------------------

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return all submodules that have no children or hold parameters of their own, each one once."""
        if isinstance(modules, nn.ModuleDict):
            modules = modules.values()
        if isinstance(modules, Iterable):
            found = [one for part in modules for one in BaseFinetuning.flatten_modules(part)]
        else:
            found = list(modules.modules())
        return [one for one in dict.fromkeys(found) if not list(one.children()) or one._parameters]

    @staticmethod
    def filter_params(
        modules: Modules, train_bn: bool = True, requires_grad: bool = True
    ) -> Generator[nn.Parameter, None, None]:
        """Yield the parameters whose ``requires_grad`` is as given; without ``train_bn`` not those of batch norms."""
        for one in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(one, BatchNorm):
                yield from (each for each in one.parameters(recurse=False) if each.requires_grad == requires_grad)

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze all parameters, and let batch norms update their running statistics."""
        for one in BaseFinetuning.flatten_modules(modules):
            _set_trained(one, True)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters that a module holds itself, and its running statistics if it is a batch norm."""
        _set_trained(module, False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze all parameters; with ``train_bn`` those of batch norms are trained."""
        for one in BaseFinetuning.flatten_modules(modules):
            _set_trained(one, train_bn and isinstance(one, BatchNorm))

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that the optimizer does not hold yet; warn about the others."""
        held, given = {id(each) for each in parameters_of(optimizer)}, list(params)
        new = [each for each in given if id(each) not in held]
        if len(new) < len(given):
            warnings.warn(
                f"{len(given) - len(new)} parameters to unfreeze are in a group of {type(optimizer).__name__} already "
                "and remain there: in configure_optimizers, pass only parameters whose requires_grad is True.",
                stacklevel=2,
            )
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules and add their parameters to an optimizer as a new group.

        Args:
            modules: The modules to unfreeze.
            optimizer: The optimizer that trains them from now on.
            lr: The learning rate of the group. None: that of the first group, divided by ``initial_denom_lr``.
            initial_denom_lr: See ``lr``.
            train_bn: Also add the parameters of batch norms.
        """
        held = {id(each) for each in parameters_of(optimizer)}
        # Batch norms that were trained from the beginning: no reason for a warning.
        trained = {id(each) for each in BaseFinetuning.filter_params(modules)} & held
        BaseFinetuning.make_trainable(modules)
        rate = float(optimizer.param_groups[0]["lr"]) / initial_denom_lr if lr is None else float(lr)
        thawed = (each for each in BaseFinetuning.filter_params(modules, train_bn) if id(each) not in trained)
        if params := BaseFinetuning.filter_on_optimizer(optimizer, thawed):
            optimizer.add_param_group({"params": params, "lr": rate})

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: TrainerView, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.strategy.fixes_parameters:
            raise ConfigurationError(
                f"{type(self).__name__} adds parameters to an optimizer during training, which "
                f"strategy={trainer.strategy.name!r} cannot do: use ddp or fsdp."
            )
        self._tuned_epoch, self._restored = None, False
        self.freeze_before_training(module)
        self._frozen = _frozen_parts(module)

    def on_fit_start(self, trainer: TrainerView, module: TrainModule) -> None:
        if self._restored and self._frozen is not None:
            # Parameters of no optimizer and batch norms, which the engine does not restore. The strategy takes the
            # change into account at the start of the epoch.
            _restore_frozen_parts(module, *self._frozen)

    def on_train_epoch_start(self, trainer: TrainerView, module: TrainModule) -> None:
        # An epoch that is resumed in its middle calls this hook again, with what it did in its place already.
        if trainer.current_epoch == self._tuned_epoch:
            return
        self._tuned_epoch = trainer.current_epoch
        for optimizer in trainer.optimizers:
            self.finetune_function(module, trainer.current_epoch, optimizer)
        self._frozen = _frozen_parts(module)

    def state_dict(self) -> dict[str, Any]:
        frozen, untracked = self._frozen or ([], [])
        return {"tuned_epoch": self._tuned_epoch, "frozen": frozen, "untracked": untracked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tuned_epoch, self._frozen = state["tuned_epoch"], (state["frozen"], state["untracked"])
        self._restored = True


def multiplicative(epoch: int) -> float:
    """Double the learning rate of the backbone in each epoch."""
    return 2.0


class BackboneFinetuning(BaseFinetuning):
    """Train a model without its ``backbone``, then unfreeze the backbone with a learning rate that grows.

    The module must create ``self.backbone`` in ``__init__``.

    Args:
        unfreeze_backbone_at_epoch: The first epoch that trains the backbone.
        lambda_func: Takes the number of the next epoch; returns the factor by which the backbone's learning rate grows
            at the start of an epoch.
        backbone_initial_ratio_lr: The first learning rate of the backbone, relative to that of the optimizer's first
            group.
        backbone_initial_lr: The first learning rate of the backbone itself, in place of the ratio.
        should_align: Let the backbone's learning rate not exceed that of the first group.
        initial_denom_lr: Accepted for compatibility; the arguments above determine the learning rate.
        train_bn: Also train the backbone's batch norms, after it is unfrozen.
        verbose: Print the learning rates in each epoch that trains the backbone.
        rounding: The number of decimals that are printed.

    Raises:
        ConfigurationError: The epoch is not a whole number; at the start of a fit, the module has no ``backbone``.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        if not is_count(unfreeze_backbone_at_epoch, 0):
            raise ConfigurationError(
                f"BackboneFinetuning(unfreeze_backbone_at_epoch={unfreeze_backbone_at_epoch!r}): give a whole number."
            )
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self.previous_backbone_lr: float | None = None
        self._note: Callable[[str], None] = print

    def setup(self, trainer: TrainerView, module: TrainModule, stage: str) -> None:
        if stage == "fit":
            if not isinstance(getattr(module, "backbone", None), nn.Module):
                raise ConfigurationError(
                    f"BackboneFinetuning freezes {type(module).__name__}.backbone before training, which is not a "
                    "module: create self.backbone in __init__."
                )
            self.previous_backbone_lr = None
            self._note = trainer.note
        super().setup(trainer, module, stage)

    def freeze_before_training(self, module: TrainModule) -> None:
        self.freeze(_backbone(module))

    def finetune_function(self, module: TrainModule, epoch: int, optimizer: Optimizer) -> None:
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        rate = float(optimizer.param_groups[0]["lr"])
        # Not only in this very epoch: a second fit may begin after it.
        if epoch == self.unfreeze_backbone_at_epoch or self.previous_backbone_lr is None:
            initial = self.backbone_initial_lr
            own = rate * self.backbone_initial_ratio_lr if initial is None else initial
            self.unfreeze_and_add_param_group(
                _backbone(module), optimizer, own, train_bn=self.train_bn, initial_denom_lr=self.initial_denom_lr
            )
        else:
            own = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            own = min(own, rate) if self.should_align else own
            backbone = {id(each) for each in _backbone(module).parameters()}
            for group in optimizer.param_groups[1:]:
                if any(id(each) in backbone for each in group["params"]):
                    set_learning_rate(group, own)
        self.previous_backbone_lr = own
        if self.verbose:
            self._note(
                f"Current lr: {round(rate, self.rounding)}, Backbone lr: {round(own, self.rounding)} (epoch {epoch})"
            )

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.previous_backbone_lr = state["previous_backbone_lr"]


def _backbone(module: TrainModule) -> nn.Module:
    backbone: nn.Module = module.get_submodule("backbone")
    return backbone


def _set_trained(module: nn.Module, trained: bool) -> None:
    """Freeze or unfreeze the parameters that a module holds itself, not those of its children."""
    if isinstance(module, BatchNorm):
        module.track_running_stats = trained
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad = trained


def _frozen_parts(module: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the frozen parameters, and of the batch norms that do not track statistics."""
    canonical = canonical_names(module)
    frozen = [canonical(name) for name, parameter in module.named_parameters() if not parameter.requires_grad]
    norms = ((name, part) for name, part in module.named_modules() if isinstance(part, BatchNorm))
    return frozen, [canonical(name) for name, part in norms if not part.track_running_stats]


def _restore_frozen_parts(module: nn.Module, frozen: list[str], untracked: list[str]) -> None:
    canonical, names, norms = canonical_names(module), set(frozen), set(untracked)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(canonical(name) not in names)
    for name, part in module.named_modules():
        if isinstance(part, BatchNorm):
            part.track_running_stats = canonical(name) not in norms
