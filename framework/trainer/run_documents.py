"""The documents in the directory of a run: ``config.json`` with settings, model and machine, and ``report.json``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..api.callback import Callback, saved_by
from ..core.split_optimizer import kind_of
from ..memory.formulas import footprint
from ..memory.measure import elements_of, size_of
from ..memory.memory_plan import casts_of
from ..report.notifications import shown_addresses
from ..report.values import timestamp
from ..resume.checkpoint_saver import num_moments
from ..resume.checkpoint_search import newest_of_run, shared_directories
from ..storage.cached_url import portable
from ..system.provenance import machine_facts, provenance
from ..system.redaction import without_secrets
from .model_measurements import ranks_of
from .resolved_settings import Settings

if TYPE_CHECKING:
    from ..loop.fit_loop import FitLoop
    from ..run.run import Run
    from .session import Session

_MOST_PARTS = 40


def configuration(session: Session, loop: FitLoop) -> dict[str, Any]:
    """Return the content of ``config.json``: arguments, what they were resolved to, plug-ins, and the provenance."""
    resources, run = session.fabric.resources, loop.run
    started = provenance()
    started["command"] = session.settings.without_addresses(started["command"])
    return {
        "trainer": arguments(session.settings),
        "resolved": {
            "accelerator": resources.device_type,
            "devices": resources.devices,
            "num_nodes": resources.num_nodes,
            "world_size": resources.world_size,
            "strategy": resources.strategy.name,
            "parallel": str(resources.layout) if resources.strategy.degrees.used else None,
            "precision": resources.precision.name,
            "seed": session.seed,
            "accumulate_grad_batches": str(session.accumulation),
            "max_epochs": session.settings.max_epochs,
            "default_root_dir": portable(session.settings.root),
        },
        "callbacks": [type(callback).__name__ for callback in session.callbacks],
        "loggers": [type(logger).__name__ for logger in session.loggers],
        "changed": _changed_arguments(session.settings),
        "ckpt_path": session.records.given_checkpoint,
        "checkpoint_directories": [portable(path) for path in _checkpoint_directories(session)],
        "model": _model_facts(run),
        "memory_plan": _memory_facts(run),
        **started,
        "machine": machine_facts(resources.device_type),
    }


def _checkpoint_directories(session: Session) -> list[Path]:
    own = [session.directory.checkpoints, session.preemption_directory()]
    return list(dict.fromkeys(path for path in [*own, *shared_directories(session.callbacks)] if path is not None))


def _changed_arguments(settings: Settings) -> dict[str, Any]:
    """Return the arguments of a Trainer that differ from their defaults: JSON values, or objects as text."""
    changed: dict[str, Any] = {}
    for each in fields(settings.given):
        value = getattr(settings.given, each.name)
        if each.name == "notify":
            value = shown_addresses(value)
        plain = _plain(value)
        if value is not each.default and not _equal(plain, _plain(each.default)):
            changed[each.name] = plain if _survives(plain) else _described(value)
    return changed


def _equal(value: Any, default: Any) -> bool:
    """Whether an argument equals its default, both as JSON values; objects of users may not compare."""
    return type(value) is type(default) and isinstance(value, (str, int, float, list, dict)) and value == default


def _described(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_described, value))
    return value if isinstance(value, str) else type(value).__name__


def arguments(settings: Settings) -> dict[str, Any]:
    """Return the arguments of a Trainer under their own names, as JSON values that ``Trainer`` accepts again.

    Times are dicts. Arguments that are or hold objects, such as callbacks, are left out, and so are addresses, in
    which there may be secrets.
    """
    given = {each.name: _plain(getattr(settings.given, each.name)) for each in fields(settings.given)}
    if shown_addresses(settings.given.notify) != settings.given.notify:
        del given["notify"]
    if isinstance(settings.given.stall_timeout, timedelta):
        # As a dict it would be read as one by section.
        given["stall_timeout"] = settings.given.stall_timeout.total_seconds()
    return {name: value for name, value in given.items() if _survives(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, timedelta):
        return {"seconds": value.total_seconds()}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _survives(value: Any) -> bool:
    """Whether a value is the same after it was written as JSON and read again."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


# ---- the model -------------------------------------------------------------------------------------------------------


def _model_facts(run: Run) -> dict[str, Any]:
    """Return the class of the module, its parameters in all and by part, and its hyperparameters, as JSON values."""
    module = run.module
    parts = [
        {"name": name, "type": type(part).__name__, **_counted(part.parameters())} for name, part in _parts(module)
    ]
    hparams = {name: _json_or_text(value) for name, value in without_secrets(dict(module.hparams)).items()}
    return {
        "class": type(module).__name__,
        **_counted(module.parameters()),
        "parts": parts[:_MOST_PARTS],
        "parts_left_out": max(0, len(parts) - _MOST_PARTS),
        "optimizers": [_optimizer(optimizer) for optimizer in run.optimizers],
        "hparams": hparams,
    }


def _memory_facts(run: Run) -> dict[str, Any] | None:
    """Return the bytes that the formulas of ``Trainer.plan`` give for a rank, without activations.

    None for a strategy that they do not know, and for layers that are split.
    """
    strategy = run.strategy
    layout = strategy.memory_layout
    if layout is None or "tp" in strategy.degrees.used:
        return None
    size = replace(size_of(run.module), state_slots=max(map(num_moments, run.optimizers), default=0))
    needs = footprint(layout, size, ranks_of(run.fabric.resources), run.precision, casts=casts_of(size, run.precision))
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
    settings = {name: _json_or_text(value) for name, value in optimizer.defaults.items()}
    # Arguments that are left at None or False say little about a run.
    return {"type": kind_of(optimizer), "settings": {k: v for k, v in settings.items() if v not in (None, False)}}


def _json_or_text(value: Any) -> Any:
    """Return a value as JSON, or its text where JSON has no such value."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return type(value).__name__ if isinstance(value, Tensor) else str(value)[:200]


# ---- the outcome -----------------------------------------------------------------------------------------------------


def checkpoints(run: Run, callbacks: list[Callback]) -> tuple[str, str]:
    """Return the paths of the best checkpoint, and of the newest that the run can be resumed from; empty for none."""
    best = next((str(saved.best_model_path) for saved in saved_by(callbacks) if saved.best_model_path), "")
    return best, str(newest_of_run(run.directory, callbacks) or "")


def outcome(session: Session, run: Run, exit_code: int) -> dict[str, Any]:
    """Return the outcome of a fit for its report. Times are in UTC."""
    progress, throughput = run.progress, run.meter.throughput()
    best, last = checkpoints(run, session.callbacks)
    ended = time.time()
    return {
        "exit_code": exit_code,
        "stopped": run.stop_reason,
        "best_score": best_score(session.callbacks),
        "began": timestamp(session.began),
        "ended": timestamp(ended),
        "duration_seconds": round(ended - session.began, 3),
        "epochs": progress.epoch,
        "optimizer_steps": progress.global_step,
        "throughput": None if throughput is None else throughput.as_dict(),
        "best_checkpoint": portable(best) if best else None,
        "last_checkpoint": last or None,
        "metrics": {name: float(value) for name, value in run.metrics.view("callback").items()},
    }


def best_score(callbacks: list[Callback]) -> dict[str, Any] | None:
    """Return the best value of the metric that the first callback with one monitors."""
    for saved in saved_by(callbacks):
        if saved.monitor is not None and saved.best_model_score is not None:
            return {"name": saved.monitor, "value": float(saved.best_model_score)}
    return None
