"""Constructor arguments declared by a dataclass, and hints for arguments that do not exist."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from ..core.arguments import unknown_argument

# Arguments of other frameworks that belong to something else than the Trainer.
ELSEWHERE = {
    "resume_from_checkpoint": "give it to fit: fit(model, ckpt_path=...)",
    "ckpt_path": "give it to fit: fit(model, ckpt_path=...)",
    "patience": "it belongs to EarlyStopping(patience=...), one of the callbacks",
    "monitor": "it belongs to EarlyStopping and ModelCheckpoint, which are callbacks",
    "seed": "call phalanx.seed_everything(seed) before",
    "model": "give it to fit: fit(model)",
    "datamodule": "give it to fit: fit(model, datamodule=...)",
    "lr": "it belongs to the optimizer, which configure_optimizers makes",
    "learning_rate": "it belongs to the optimizer, which configure_optimizers makes",
    "batch_size": "it belongs to the DataLoader",
    "auto_lr_find": "call trainer.find_lr before fit",
    "auto_scale_batch_size": "call trainer.find_batch_size before fit, or pass global_batch_size=... and "
    "micro_batch_size='auto', which is found as the fit trains",
    "track_grad_norm": "leave it out, and log the norm in on_before_optimizer_step",
}
"""For arguments that belong to something else than the Trainer: what to do instead."""


P = ParamSpec("P")
T = TypeVar("T")


def takes(settings: Callable[P, T]) -> Callable[[Callable[[Any, T], None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator: the constructor accepts the fields of a dataclass as keyword arguments.

    The signature and the list of arguments in the docstring are those of the dataclass.
    """
    declared = {each.name: each for each in fields(settings)}  # type: ignore[arg-type]

    def decorate(constructor: Callable[[Any, T], None]) -> Callable[Concatenate[Any, P], None]:
        @wraps(constructor)
        def construct(self: Any, *positional: Any, **arguments: Any) -> None:
            if positional:
                raise TypeError(f"{construct.__qualname__} takes keyword arguments only, but got {positional[0]!r}.")
            for name in arguments:
                if name not in declared:
                    raise unknown_argument("Trainer", name, arguments[name], declared, ELSEWHERE)
            constructor(self, settings(**arguments))  # type: ignore[call-arg]

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        # With types instead of their names, which a reader of the signature could not look up in this module.
        parameters = [own, *inspect.signature(settings, eval_str=True).parameters.values()]
        construct.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        lines = [f"    {name}: {each.metadata['documentation']}" for name, each in declared.items()]
        construct.__doc__ = f"{constructor.__doc__}\n\nArgs:\n" + "\n".join(lines)
        return cast("Callable[Concatenate[Any, P], None]", construct)

    return decorate
