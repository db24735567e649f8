"""Modules whose parameters have another dtype than the rest of their unit: torch gathers each dtype by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn

from ...framework.core.errors import ConfigurationError
from ...framework.parallel.blocks import has_forward


def modules_of_other_dtypes(module: nn.Module, units: Collection[nn.Module]) -> list[nn.Module]:
    """Return the modules that must be units of their own, so that each unit trains parameters of one dtype.

    Raises:
        ConfigurationError: a module holds parameters of several dtypes, or other modules besides.
    """
    trained = {each.dtype for each in module.parameters() if each.requires_grad}
    if len(trained) < 2:
        return []
    names = {part: name for name, part in module.named_modules()}
    found: list[nn.Module] = []
    for unit in (module, *units):
        held = [(part, _dtypes(part.parameters(recurse=False))) for part in _inside(unit, set(units))]
        sizes = sum((sizes for _, sizes in held), Counter[torch.dtype]())
        if len(sizes) < 2:
            continue
        most = max(sizes, key=lambda dtype: sizes[dtype])
        for part, own in held:
            if not own or set(own) == {most}:
                continue
            if part is unit or len(own) > 1 or not has_forward(part) or any(True for _ in part.children()):
                raise ConfigurationError(
                    f"{names[part] or type(part).__name__} ({type(part).__name__}) trains parameters of the dtypes "
                    f"{', '.join(sorted(str(each).removeprefix('torch.') for each in sizes))} in one unit, which are "
                    "gathered together: put those of each dtype into a submodule of their own that is called, give "
                    "them one dtype, or use strategy='ddp'."
                )
            found.append(part)
    return found


def _dtypes(parameters: Iterable[nn.Parameter]) -> Counter[torch.dtype]:
    """Return the number of trained elements of each dtype."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        if parameter.requires_grad:
            sizes[parameter.dtype] += parameter.numel()
    return sizes


def _inside(part: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield a module and its submodules, without those of other units."""
    yield part
    for child in part.children():
        if child not in units:
            yield from _inside(child, units)
