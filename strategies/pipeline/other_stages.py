"""Parameters of the stages of other ranks, and hooks that a pipeline would call otherwise than plain PyTorch does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...framework.core.errors import ConfigurationError
from ...framework.parallel.elsewhere import Elsewhere, is_called_by_user


class OfOtherStage(Elsewhere, nn.Parameter):
    """A parameter that another rank of the pipeline holds."""

    sentence = (
        "this code uses the values or the gradient of a parameter that another stage of the pipeline holds, "
        "and ranks have no others than those of their own stage: use strategy='fsdp' or 'ddp', or leave out "
        "parameters with is_meta and expect results for the stage of each rank."
    )


class StateOfStages(defaultdict[Any, Any]):
    """The state of an optimizer for the parameters of this rank; that of another stage is refused, not empty."""

    def __missing__(self, parameter: Any) -> Any:
        """Return an empty state for a parameter of this rank."""
        if isinstance(parameter, OfOtherStage) and is_called_by_user():
            raise ConfigurationError(
                "optimizer.state of a parameter that another stage of the pipeline holds was read: use "
                "strategy='fsdp' or 'ddp', or loop over optimizer.state, which has the parameters of the rank's stages."
            )
        return super().__missing__(parameter)


def _refuse_loading(*_: Any) -> None:
    if is_called_by_user():
        raise OfOtherStage.error()


def mark_elsewhere(module: nn.Module, owners: Mapping[int, int | None], own: int) -> list[RemovableHandle]:
    """Guard the parameters of a module that only another rank holds; return the hooks of ``load_state_dict``.

    It would put the error of a parameter into the text of a ``RuntimeError`` of its own.
    """
    for parameter in module.parameters():
        if owners[id(parameter)] not in (None, own) and type(parameter) is nn.Parameter:
            # No ordinary way: an optimizer and the modules hold the parameter.
            parameter.__class__ = OfOtherStage
    absent = [part for part in module.modules() if any(type(p) is OfOtherStage for p in part._parameters.values())]
    return [part.register_load_state_dict_pre_hook(_refuse_loading) for part in absent]


def check_hooks(parameters: Iterable[Tensor], modules: Iterable[nn.Module]) -> None:
    """Refuse hooks on the gradients of parameters and modules: a pipeline would call them for each micro-batch.

    Raises:
        ConfigurationError: there are such hooks.
    """
    hooked = any(each._backward_hooks or getattr(each, "_post_accumulate_grad_hooks", None) for each in parameters)
    parts = [part for part in modules if part._backward_hooks or part._backward_pre_hooks]
    if hooked or parts:
        what = f"{type(parts[0]).__name__} has a backward hook" if parts else "a parameter has a hook on its gradient"
        raise ConfigurationError(
            f"{what}, which a pipeline would call for the gradients of single micro-batches, on the rank of one stage: "
            "change gradients in on_before_optimizer_step, or use strategy='fsdp' or 'ddp'."
        )
