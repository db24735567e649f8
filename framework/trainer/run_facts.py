"""Facts about the model of a fit for its report: parameters by part, hyperparameters, and memory by formula."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..core.split_optimizer import kind_of
from ..memory.formulas import LAYOUTS, footprint
from ..memory.measure import elements_of, size_of
from ..memory.memory_plan import casts_of
from ..memory.ranks import Ranks
from ..resume.checkpoint_saver import moments
from ..system.redaction import without_secrets

if TYPE_CHECKING:
    from ..run.run import Run

_MOST_PARTS = 40


def model_facts(run: Run) -> dict[str, Any]:
    """Return the class of the module, its parameters in all and by part, and its hyperparameters, as JSON values."""
    module = run.module
    parts = [
        {"name": name, "type": type(part).__name__, **_counted(part.parameters())} for name, part in _parts(module)
    ]
    hparams = {name: _plain(value) for name, value in without_secrets(dict(module.hparams)).items()}
    return {
        "class": type(module).__name__,
        **_counted(module.parameters()),
        "parts": parts[:_MOST_PARTS],
        "parts_left_out": max(0, len(parts) - _MOST_PARTS),
        "optimizers": [_optimizer(optimizer) for optimizer in run.optimizers],
        "hparams": hparams,
    }


def memory_facts(run: Run) -> dict[str, Any] | None:
    """Return the bytes that the formulas of ``Trainer.plan`` give for a rank, without activations.

    None for a strategy that they do not know, and for layers that are split.
    """
    strategy = run.strategy
    layout = LAYOUTS.get(strategy.name)
    if layout is None or "tp" in strategy.degrees.used:
        return None
    size = replace(size_of(run.module), state_slots=max(map(moments, run.optimizers), default=0))
    resources, precision = run.fabric.resources, run.precision
    ranks = Ranks(resources.world_size, resources.devices, resources.degrees)
    needs = footprint(layout, size, ranks, precision, casts=casts_of(size, precision))
    return {
        "strategy": run.strategy.name,
        "device_bytes": needs.device.total,
        "host_bytes": needs.host.total,
        "disk_bytes": needs.disk.total,
        "parts": {name: value for name, value in asdict(needs.everywhere).items() if value},
        "counts_activations": False,
    }


def _parts(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Return the parts of a model with parameters: its children, or those of an only child."""
    children = [(name, child) for name, child in module.named_children() if next(child.parameters(), None) is not None]
    if len(children) == 1 and (inner := list(_parts(children[0][1]))):
        return [(f"{children[0][0]}.{name}", part) for name, part in inner]
    return children


def _counted(parameters: Iterable[Tensor]) -> dict[str, int]:
    """Count parameters and their bytes in full, whatever part of them this rank holds."""
    known = [parameter for parameter in parameters if not is_lazy(parameter)]
    return {
        "parameters": sum(map(elements_of, known)),
        "trainable": sum(elements_of(parameter) for parameter in known if parameter.requires_grad),
        "bytes": sum(elements_of(parameter) * parameter.element_size() for parameter in known),
    }


def _optimizer(optimizer: Any) -> dict[str, Any]:
    settings = {name: _plain(value) for name, value in optimizer.defaults.items()}
    # Arguments that are left at None or False say little about a run.
    return {"type": kind_of(optimizer), "settings": {k: v for k, v in settings.items() if v not in (None, False)}}


def _plain(value: Any) -> Any:
    """Return a value as JSON, or its text where JSON has no such value."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return type(value).__name__ if isinstance(value, Tensor) else str(value)[:200]
