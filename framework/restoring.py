"""A run put back to where a checkpoint stands: weights, optimizers, schedulers, scaler, callbacks and counters."""

from __future__ import annotations

from typing import Any

from .checkpoint.codec import decode
from .checkpoint.read import Checkpoint
from .checkpoint.stored import SavedTensor
from .errors import CheckpointError
from .model_state import check_model
from .optimizer_state import check_optimizers, load_optimizer, names_of
from .run import Run


def restore_run(run: Run, checkpoint: Checkpoint) -> None:
    """Put weights, optimizers, schedulers, scaler, callbacks and counters back. Collective.

    Raises:
        CheckpointError: the checkpoint is of another model or of other optimizers; nothing has been changed then.
    """
    document = checkpoint.document
    if document.get("weights_only"):
        raise CheckpointError(
            f"{checkpoint.path} holds weights alone, so no training can be resumed from it. "
            "Start from its weights with load_from_checkpoint, or give a full checkpoint."
        )
    saved = document["optimizers"]
    names = names_of(run.module)
    strategy = run.fabric.strategy
    check_model(type(run.module), strategy.shapes(run.module), checkpoint, strict=True)
    check_optimizers(run.optimizers, saved, names)
    load_model(run, checkpoint)
    for index, optimizer in enumerate(run.optimizers):
        load_optimizer(strategy, optimizer, saved[index], names, checkpoint, index)
    state = decode(document["state"], checkpoint.read_section("state"))
    if len(state["schedulers"]) != len(run.schedulers):
        raise CheckpointError(
            f"{checkpoint.path} holds {len(state['schedulers'])} schedulers, configure_optimizers returned "
            f"{len(run.schedulers)}: they must be the same."
        )
    for config, scheduler_state in zip(run.schedulers, state["schedulers"], strict=True):
        config.scheduler.load_state_dict(scheduler_state)
    if run.fabric.scaler is not None and state["scaler"] is not None:
        run.fabric.scaler.load_state_dict(state["scaler"])
    for callback in run.callbacks:
        if callback.state_key in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][callback.state_key])
    run.metrics["callback"].update(state["metrics"])
    run.progress.load_state_dict(document["progress"])
    run.call("on_load_checkpoint", state["user"])


def rank_state(run: Run, checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return this rank's own state, or None where the data was shared out otherwise when the checkpoint was written."""
    documents, world = checkpoint.rank_documents, run.world
    parts = checkpoint.document.get("data_ranks", len(documents))
    if parts != world.data_size or not documents:
        return None
    decoded: dict[str, Any] = decode(documents[world.data_rank * (len(documents) // parts)])
    return decoded


def load_model(run: Run, checkpoint: Checkpoint) -> None:
    """Put the weights back. Collective."""
    tensors = {name: SavedTensor(checkpoint, "model", name) for name in checkpoint.names("model")}
    run.fabric.strategy.load_model_state(run.module, tensors)
