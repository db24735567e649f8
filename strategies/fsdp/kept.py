"""Parameters that modules keep in lists and dicts besides those that are registered."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# Longer lists in attributes are data, which holds no parameters.
_MOST_KEPT = 100_000


@contextmanager
def keeping(module: nn.Module) -> Generator[None, None, None]:
    """Context in which parameters of a module are replaced: lists and dicts then hold the new ones, by name."""
    kept = list(_kept_parameters(module))
    yield
    parameters = dict(module.named_parameters())
    for held, key, name in kept:
        held[key] = parameters[name]


def _kept_parameters(module: nn.Module) -> Iterator[tuple[Any, Any, str]]:
    """Yield the lists and dicts in attributes of modules that hold parameters: the container, the key, the name."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    own = set(vars(nn.Module()))
    containers = [value for part in module.modules() for key, value in vars(part).items() if key not in own]
    seen: set[int] = set()
    while containers:
        held = containers.pop()
        if id(held) in seen or not isinstance(held, list | dict | tuple) or len(held) > _MOST_KEPT:
            continue
        seen.add(id(held))
        for key, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
            if not isinstance(value, nn.Parameter):
                containers.append(value)
            elif id(value) in names and not isinstance(held, tuple):
                yield held, key, names[id(value)]
