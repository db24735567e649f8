"""Parameters that modules keep in lists, dicts and sets besides those that are registered."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

# Longer lists in attributes are data, which holds no parameters.
_MOST_KEPT = 100_000


@contextmanager
def keeping(module: nn.Module) -> Generator[None, None, None]:
    """Context in which parameters of a module are replaced: its lists, dicts and sets then hold the new ones."""
    before = dict(module.named_parameters())
    kept = list(_containers_of_parameters(module))
    yield
    after = dict(module.named_parameters())
    new = {id(parameter): after[name] for name, parameter in before.items()}
    for held in kept:
        _renew(held, new)


def _containers_of_parameters(module: nn.Module) -> Iterator[list[Any] | dict[Any, Any] | set[Any]]:
    """Yield the containers in attributes of modules that hold parameters, also those in other containers."""
    own = set(vars(nn.Module()))
    containers = [value for part in module.modules() for key, value in vars(part).items() if key not in own]
    seen: set[int] = set()
    while containers:
        held = containers.pop()
        if id(held) in seen or not isinstance(held, list | dict | set | tuple) or len(held) > _MOST_KEPT:
            continue
        seen.add(id(held))
        contents = [*held, *(held.values() if isinstance(held, dict) else ())]
        containers += contents
        if not isinstance(held, tuple) and any(isinstance(each, nn.Parameter) for each in contents):
            yield held


def _renew(held: list[Any] | dict[Any, Any] | set[Any], new: Mapping[int, nn.Parameter]) -> None:
    """Replace the parameters in a container by the new ones, and leave everything else in its order."""

    def renewed(value: Any) -> Any:
        return new.get(id(value), value)

    if isinstance(held, list):
        held[:] = map(renewed, held)
    elif isinstance(held, set):
        contents = set(map(renewed, held))
        held.clear()
        held |= contents
    else:
        items = [(renewed(key), renewed(value)) for key, value in held.items()]
        held.clear()
        held.update(items)
