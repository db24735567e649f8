"""The state of a run as canonical state for a checkpoint; ``restore`` loads it.

Tensors are stored by parameter name; optimizer state by optimizer, slot and parameter name; everything else as JSON.
State that differs between ranks (random generators, values logged in the epoch so far) is one document per rank.
"""

from __future__ import annotations

from typing import Any

from ..checkpoint.codec import encode
from ..checkpoint.consolidate import AVERAGES
from ..checkpoint.manifest import JSON
from ..checkpoint.write_plan import Shard, Snapshot
from ..data.accumulation_window import Windows
from ..parallel.parameter_names import canonical_names, names_of
from ..run.run import Run
from ..state.class_hyperparameters import class_names
from ..state.module_state import encode_known, extra_state, model_state
from ..state.optimizer_state import optimizer_state, whole
from .rank_state import capture_rank


def live_weights(run: Run) -> dict[str, Shard]:
    """Return this rank's part of the trained weights, also while the module computes with averaged weights.

    Collective.
    """
    return run.averages.with_live(model_state(run.strategy, run.module))


def capture_run(run: Run, windows: Windows | None, seed: int, weights_only: bool) -> Snapshot:
    """Return the content of a checkpoint; with ``weights_only`` only the model and its hyperparameters. Collective."""
    sections: dict[str, dict[str, Shard]] = {"model": live_weights(run)}
    if averages := run.averages.shards():
        sections[AVERAGES] = averages
    document = _described(run, weights_only)
    canonical = canonical_names(run.module)
    buffers = {canonical(name) for name, _ in run.module.named_buffers(remove_duplicate=False)}
    if weights_only:
        if extra := extra_state(run.module):
            document["state"], sections["state"] = _encoded({"extra": extra}, run)
        return Snapshot(sections=sections, document=document, rank_document=None, buffers=buffers)
    _add_training(run, windows, document, sections)
    document["seed"] = seed
    return Snapshot(sections=sections, document=document, rank_document=capture_rank(run, windows), buffers=buffers)


def _described(run: Run, weights_only: bool) -> dict[str, Any]:
    """Return the part of the document that every checkpoint contains."""
    hparams, unsaved = encode_known(dict(run.module.hparams))
    document: dict[str, Any] = {
        "module": f"{type(run.module).__module__}.{type(run.module).__qualname__}",
        "hparams": hparams,
        "unsaved_hparams": unsaved,
        "class_hparams": class_names(run.module.hparams),
        "progress": run.progress.state_dict(),
        "weights_only": weights_only,
        "run": run.directory.identity,
        # For display by tools; no decision depends on them.
        "strategy": run.strategy.name,
        "precision": run.precision.name,
    }
    if len(run.averages):
        document[AVERAGES] = run.averages.state_dict()
    return document


def _add_training(
    run: Run, windows: Windows | None, document: dict[str, Any], sections: dict[str, dict[str, Shard]]
) -> None:
    """Add optimizers, schedulers, other states and the position in the data. Collective."""
    names, strategy = names_of(run.module), run.strategy
    states = [optimizer_state(strategy, optimizer, names, index) for index, optimizer in enumerate(run.optimizers)]
    sections["optimizer"] = {name: shard for _, shards in states for name, shard in shards.items()}
    user: dict[str, Any] = {}
    run.call("on_save_checkpoint", user)
    values = run.metrics.values
    state = {
        **_states(run),
        "metrics": values["callback"],
        "shown": {reader: values[reader] for reader in ("logged", "progress_bar")},
        "user": user,
    }
    document["optimizers"] = [described for described, _ in states]
    document["schedulers"] = [type(config.scheduler).__name__ for config in run.schedulers]
    document["state"], sections["state"] = _encoded(state, run)
    document["data_ranks"] = run.world.data_size
    document["position"] = windows.position() if windows is not None else None
    document["data"] = windows.source.described() if windows is not None else None
    document["loggers"] = run.loggers.state_dicts(run.marks)


def check_state(run: Run) -> None:
    """Check before training that the states of schedulers, callbacks and modules can be saved.

    Raises:
        ConfigurationError: a value has a type that cannot be saved; the message names its place.
    """
    encode(_states(run))


def _states(run: Run) -> dict[str, Any]:
    return {
        "schedulers": [config.scheduler.state_dict() for config in run.schedulers],
        "scaler": run.scaler.state_dict() if run.scaler is not None else None,
        "callbacks": {callback.state_key: callback.state_dict() for callback in run.callbacks},
        "extra": extra_state(run.module),
    }


def _encoded(state: dict[str, Any], run: Run) -> tuple[JSON, dict[str, Shard]]:
    """Return a document and the tensors that it refers to, both from rank 0."""
    encoded, tensors = encode(state)
    return encoded, whole(tensors) if run.world.is_global_zero else {}
