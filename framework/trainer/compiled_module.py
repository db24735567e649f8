"""Modules that ``torch.compile`` has wrapped: their steps run compiled in a stage, and the module itself is used."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..api.train_module import TrainModule
from ..parallel.strategy import Strategy
from ..run.overrides import is_overridden

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# Python code with locks and tables, which a compiler would trace in vain.
_PLAIN = ("log", "log_dict")


def original_of(model: Any, strategy: Strategy) -> tuple[Any, Compiler | None]:
    """Return the module in the result of ``torch.compile``, and the compiler of functions with the same options.

    Any other object is returned as it is, with None.

    Raises:
        ConfigurationError: the strategy does not support compiled modules.
    """
    original = model._modules.get("_orig_mod") if isinstance(model, nn.Module) and "_modules" in vars(model) else None
    compiler = getattr(model, "dynamo_ctx", None)
    if isinstance(original, TrainModule) and compiler is not None:
        strategy.check_module(model)
        return original, compiler
    return model, None


@contextmanager
def compiled_steps(module: TrainModule, compiler: Compiler | None) -> Generator[None, None, None]:
    """Replace the steps of a module, and its forward, by compiled ones within the context."""
    if compiler is None:
        yield
        return
    names = [name for name in _STEPS if is_overridden(name, module)]
    if type(module).forward is not nn.Module.forward:
        names.append("forward")
    before = {name: vars(module)[name] for name in (*names, *_PLAIN) if name in vars(module)}
    replaced = {name: compiler(getattr(module, name)) for name in names}
    replaced |= {name: torch.compiler.disable(getattr(module, name)) for name in _PLAIN}
    for name, function in replaced.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name in replaced:
            delattr(module, name)
            if name in before:
                setattr(module, name, before[name])
