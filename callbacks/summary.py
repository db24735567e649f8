"""``ModelSummary``: prints a table of the modules of a model and their numbers of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parameter import is_lazy

from ..framework.api.callback import Callback
from ..framework.core.errors import ConfigurationError

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule

_UNITS = ("", " K", " M", " B", " T")


class ModelSummary(Callback):
    """Print the modules of the model, their numbers of parameters and the total size when a fit starts, on rank 0.

    Args:
        max_depth: Number of levels of modules to list. 0: print nothing; -1: list all levels.

    Raises:
        ConfigurationError: The depth is below -1.
    """

    def __init__(self, max_depth: int = 1) -> None:
        if isinstance(max_depth, bool) or not isinstance(max_depth, int) or max_depth < -1:
            raise ConfigurationError(f"ModelSummary(max_depth={max_depth!r}): give a number of levels, or -1 for all.")
        self.max_depth = max_depth

    def on_fit_start(self, trainer: TrainerView, module: TrainModule) -> None:
        if trainer.is_global_zero and trainer.verbose and self.max_depth != 0:
            trainer.note(summarize(module, self.max_depth))


class RichModelSummary(ModelSummary):
    """A ``ModelSummary`` under the name of Lightning's variant; the table is the same."""


@dataclass
class _Count:
    """Number of parameters of a module. Parameters that are shared between modules are counted once."""

    trainable: int = 0
    frozen: int = 0
    size_bytes: int = 0
    lazy: bool = False

    @property
    def total(self) -> int:
        return self.trainable + self.frozen


def summarize(module: nn.Module, max_depth: int = 1) -> str:
    """Return the table as text. Lazy parameters, whose shape depends on the first batch, are not counted."""
    rows = [
        (name, type(part).__name__, _shown(_count(part.parameters())), _mode(part))
        for name, part in module.named_modules()
        if name and (max_depth < 0 or name.count(".") < max_depth)
    ]
    total = _count(module.parameters())
    lines = _table([("Name", "Type", "Params", "Mode"), *rows]) if rows else []
    lines += [
        f"{_short(total.trainable)} trainable, {_short(total.frozen)} frozen, {_short(total.total)} parameters in all, "
        f"{total.size_bytes / 1e6:,.3f} MB."
    ]
    if total.lazy:
        lines.append("Lazy layers, whose shape depends on the first batch, are not counted.")
    return "\n".join(lines)


def _count(parameters: Iterable[nn.Parameter]) -> _Count:
    count = _Count()
    for parameter in parameters:
        if is_lazy(parameter):
            count.lazy = True
            continue
        # DeepSpeed replaces a partitioned parameter by an empty one, and stores the full size in ds_numel.
        number = int(getattr(parameter, "ds_numel", parameter.numel()))
        if parameter.requires_grad:
            count.trainable += number
        else:
            count.frozen += number
        count.size_bytes += number * parameter.element_size()
    return count


def _shown(count: _Count) -> str:
    return "?" if count.lazy else _short(count.total)


def _mode(part: nn.Module) -> str:
    return "train" if part.training else "eval"


def _short(number: int) -> str:
    """Return a count with about three digits: ``0``, ``999``, ``1.2 K``, ``21.3 M``."""
    value, unit = float(number), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f}{_UNITS[unit]}" if not unit or value >= 99.95 else f"{value:.1f}{_UNITS[unit]}"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = "-" * max(map(len, lines))
    return [lines[0], rule, *lines[1:], rule]
