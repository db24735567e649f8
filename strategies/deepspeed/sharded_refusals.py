"""Refusals of what a module cannot do while stage 3 shards its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ...framework.core.errors import ConfigurationError, LoopError
from .pieces import is_split


def refuse_empty_state(module: nn.Module, is_whole: Callable[[Any], bool]) -> list[RemovableHandle]:
    """Let ``state_dict`` raise while a parameter is sharded: it would hold tensors without elements.

    Args:
        module: the module.
        is_whole: whether all elements of a parameter are here.

    Returns:
        The handles of the hooks, one for each part of the module that has parameters.
    """

    def check(part: nn.Module, prefix: str, keep_vars: bool) -> None:
        # With keep_vars the parameters themselves are asked for, by code that knows them to be sharded.
        for name, parameter in () if keep_vars else part._parameters.items():
            if parameter is not None and is_split(parameter) and not is_whole(parameter):
                raise ConfigurationError(
                    f"state_dict() of {type(part).__name__} would hold '{prefix}{name}' without elements: the strategy "
                    "shards parameters over the ranks: save the module itself, with fabric.save(path, {'model': "
                    "model}) or fabric.save_model(model, directory), and in a Trainer with "
                    "trainer.save_checkpoint(path)."
                )

    return [part.register_state_dict_pre_hook(check) for part in module.modules() if part._parameters]


def no_copy(part: nn.Module) -> Callable[[Any], Any]:
    """Return the ``__deepcopy__`` of a module whose layers gather their parameters."""

    def refuse(memo: Any) -> Any:
        raise ConfigurationError(
            f"copy.deepcopy of {type(part).__name__} is not possible under ZeRO stage 3, whose engine is in the hooks "
            "of the layers: copy the module before the set-up, or copy single parameters."
        )

    return refuse


def explained(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``step`` with errors of its own for those of DeepSpeed about what user code does to layers."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except RuntimeError as error:
            if not str(error).startswith("Detected a disagreement on list contents"):
                raise
            raise LoopError(
                "the ranks ran different layers in the last step, and ZeRO stage 3 gathers the weights of each layer "
                "on all of them: run the same layers on all ranks, or use strategy='zero2'."
            ) from error
        except AttributeError as error:
            if "has no attribute 'ds_" not in str(error):
                raise
            raise ConfigurationError(
                "a layer has a parameter that it did not have at the set-up, as torch.func.functional_call or an "
                "assignment puts it there, and ZeRO stage 3 gathers those of the set-up: change parameters in place, "
                "or use strategy='zero2'."
            ) from error

    return run
