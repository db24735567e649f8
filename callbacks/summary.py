"""``ModelSummary``: prints a table of the modules of a model, their parameters, FLOPs and sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy

from ..framework.api.callback import Callback
from ..framework.core.absent_names import lacks
from ..framework.core.arguments import check_names
from ..framework.core.errors import ConfigurationError
from ..framework.core.foreign_names import MEMBERS
from ..framework.diagnostics.isolated_step import isolated
from ..framework.system.console import folded, terminal_columns
from .forward_trace import Forward, trace_forward

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule

_UNITS = ("", " K", " M", " B", " T")


@lacks(MEMBERS["ModelSummary"])
class ModelSummary(Callback):
    """Print the modules of the model when a fit starts, on rank 0.

    Each row has the number of parameters and its share, the dtypes of the parameters, and the mode. If the module has
    an ``example_input_array``, the rows also have the FLOPs and the sizes of the inputs and outputs of its forward
    pass on it: one pass in evaluation mode, without gradients, which changes no buffer and no random generator. It
    runs on rank 0, or on all ranks if the strategy requires that. A tensor is the argument of ``forward``, a tuple or
    list its arguments, and a dict its keyword arguments.

    Args:
        max_depth: Number of levels of modules to list. 0: print nothing; -1: list all levels.
        summarize_kwargs: Accepted for compatibility with Lightning: ``header_style`` of a table drawn by rich.

    Raises:
        ConfigurationError: The depth is below -1.
        UnknownArgumentError: There is no such argument.
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        check_names(type(self).__name__, summarize_kwargs, ("max_depth", "header_style"))
        if isinstance(max_depth, bool) or not isinstance(max_depth, int) or max_depth < -1:
            raise ConfigurationError(f"ModelSummary(max_depth={max_depth!r}): give a number of levels, or -1 for all.")
        self.max_depth = max_depth

    def on_fit_start(self, trainer: TrainerView, module: TrainModule) -> None:
        if self.max_depth == 0 or not trainer.verbose:
            return
        trace, problem = _traced(trainer, module)
        if trainer.is_global_zero:
            trainer.note(_cut(summarize(module, self.max_depth, trace) + problem))


class RichModelSummary(ModelSummary):
    """A ``ModelSummary`` under the name of Lightning's variant; the table is the same."""


def _cut(table: str) -> str:
    """Return a table with its rows cut, and the sentences below it folded, to the width of the terminal."""
    columns = terminal_columns()
    if columns is None:
        return table
    lines: list[str] = []
    for line in table.splitlines():
        is_row = " | " in line or line.startswith("---")
        lines += [f"{line[: columns - 1]}…" if len(line) > columns else line] if is_row else folded(line, columns)
    return "\n".join(lines)


def _traced(trainer: TrainerView, module: TrainModule) -> tuple[dict[str, Forward] | None, str]:
    """Return the measurements of the forward pass on the example, or None and a line that says why there are none.

    Collective if the strategy's forward passes are.
    """
    example, strategy = module.example_input_array, trainer.strategy
    if example is None or not (trainer.is_global_zero or strategy.traits.forward_has_collectives):
        return None, ""
    fabric = trainer.fabric
    try:
        with isolated(module), fabric.autocast():
            return trace_forward(module, fabric.precision.convert_batch(fabric.to_device(example))), ""
    # The summary must not end a run whose example is outdated.
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return None, f"\nNo sizes and FLOPs, as forward(example_input_array) failed: {reason}"


@dataclass
class _Count:
    """Number of parameters of a module. Parameters that are shared between modules are counted once."""

    trainable: int = 0
    frozen: int = 0
    size_bytes: int = 0
    lazy: bool = False
    dtypes: set[str] = field(default_factory=set)
    """Names such as ``float32``."""

    @property
    def total(self) -> int:
        return self.trainable + self.frozen


def summarize(module: nn.Module, max_depth: int = 1, trace: Mapping[str, Forward] | None = None) -> str:
    """Return the table as text. Lazy parameters, whose shape depends on the first batch, are not counted.

    Args:
        module: The model.
        max_depth: Number of levels of modules to list; -1 for all.
        trace: Measurements of a forward pass by module name, from ``trace_forward``.
    """
    total = _count(module.parameters())
    rows = [
        (name, *_cells(part, _count(part.parameters()), total, trace[name] if trace else None))
        for name, part in module.named_modules()
        if name and (max_depth < 0 or name.count(".") < max_depth)
    ]
    own = _count(module.parameters(recurse=False))
    if own.total and rows:
        rows.append(("(own)", *_cells(module, own, total, Forward(flops=-1) if trace else None)))
    header = ("Name", "Type", "Params", "Share", "Dtype", "Mode", *(("FLOPs", "In size", "Out size") if trace else ()))
    lines = _table([header, *rows]) if rows else []
    lines += [
        f"{_short(total.trainable)} trainable, {_short(total.frozen)} frozen, {_short(total.total)} parameters in all, "
        f"{total.size_bytes / 1e6:,.3f} MB."
    ]
    if total.lazy:
        lines.append("Lazy layers, whose shape depends on the first batch, are not counted.")
    if trace:
        lines.append(f"A forward pass on example_input_array takes {_short(trace[''].flops)} FLOPs.")
    return "\n".join(lines)


def _cells(part: nn.Module, count: _Count, total: _Count, forward: Forward | None) -> tuple[str, ...]:
    """Return the cells of a row after the name."""
    share = f"{100 * count.total / total.total:.1f} %" if total.total and not count.lazy else ""
    cells = (type(part).__name__, _shown(count), share, ", ".join(sorted(count.dtypes)), _mode(part))
    if forward is None:
        return cells
    is_measured = forward.flops >= 0
    return (*cells, _short(forward.flops) if is_measured else "", forward.in_size, forward.out_size)


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
        count.dtypes.add(str(parameter.dtype).removeprefix("torch."))
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
