"""All that a run is made of, as canonical state: taken for a checkpoint, and put back from one.

Tensors are held by parameter name; optimizer state by optimizer, slot and parameter name; everything else as JSON.
What differs from rank to rank (random generators, what has been logged in the epoch so far) is a document of each rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .checkpoint.codec import decode, encode, encode_inline
from .checkpoint.plan import Shard, Snapshot
from .checkpoint.read import Checkpoint
from .checkpoint.stored import SavedTensor
from .checkpoint.write import has_nonfinite, save
from .errors import CheckpointError, ConfigurationError, NonFiniteError
from .model_state import check_model, encode_known
from .optimizer_state import check_optimizers, load_optimizer, names_of, optimizer_state, whole
from .run import Run
from .seed import capture
from .windows import Windows


def save_run(run: Run, path: Path, windows: Windows | None, seed: int, weights_only: bool = False) -> None:
    """Save a run as it stands after its last optimizer step. Collective.

    Raises:
        NonFiniteError: on all ranks; a weight is NaN or infinite, and nothing was written.
        StorageError: on all ranks; it could not be written, and what was there is untouched.
        ConfigurationError: an accumulation window is under way.
    """
    strategy = run.fabric.strategy
    if run.in_window:
        raise ConfigurationError(
            "save_checkpoint was called in the middle of an accumulation window, where gradients are half gathered: "
            "call it in on_train_batch_end once trainer.global_step has grown, or at an epoch's end."
        )
    # Each rank looks at what it holds; what one finds, all hear. Buffers may be infinite by design, as masks are.
    trained = {name for name, _ in run.module.named_parameters(remove_duplicate=False)}
    held = {name: shard.tensor for name, shard in strategy.model_state(run.module).items() if name in trained}
    found = run.world.all_gather_object(has_nonfinite(held))
    name = next((name for name in found if name is not None), None)
    if name is not None:
        raise NonFiniteError(
            f"{name} is not finite at optimizer step {run.progress.global_step}, so {path.name} was not saved: "
            "resume from the last good checkpoint with a lower learning rate or with gradient clipping."
        )
    save(path, capture_run(run, windows, seed, weights_only), run.world, sharded=not strategy.traits.replicates)


def capture_run(run: Run, windows: Windows | None, seed: int, weights_only: bool) -> Snapshot:
    """Return what a checkpoint keeps of a run; with ``weights_only`` the model and its hyperparameters. Collective."""
    sections: dict[str, dict[str, Shard]] = {"model": run.fabric.strategy.model_state(run.module)}
    hparams, unsaved = encode_known(dict(run.module.hparams))
    document: dict[str, Any] = {
        "module": f"{type(run.module).__module__}.{type(run.module).__qualname__}",
        "hparams": hparams,
        "unsaved_hparams": unsaved,
        "progress": run.progress.state_dict(),
        "weights_only": weights_only,
    }
    buffers = {name for name, _ in run.module.named_buffers(remove_duplicate=False)}
    if weights_only:
        return Snapshot(sections=sections, document=document, rank_document=None, buffers=buffers)
    names = names_of(run.module)
    strategy = run.fabric.strategy
    states = [optimizer_state(strategy, optimizer, names, index) for index, optimizer in enumerate(run.optimizers)]
    sections["optimizer"] = {name: shard for _, shards in states for name, shard in shards.items()}
    user: dict[str, Any] = {}
    run.call("on_save_checkpoint", user)
    state = {
        "schedulers": [config.scheduler.state_dict() for config in run.schedulers],
        "scaler": run.fabric.scaler.state_dict() if run.fabric.scaler is not None else None,
        "callbacks": {callback.state_key: callback.state_dict() for callback in run.callbacks},
        "metrics": run.metrics["callback"],
        "user": user,
    }
    encoded, state_tensors = encode(state)
    sections["state"] = whole(state_tensors)
    document["optimizers"] = [described for described, _ in states]
    document["state"] = encoded
    document["seed"] = seed
    document["data_ranks"] = run.world.data_size
    document["position"] = windows.position() if windows is not None else None
    rank_state = {"random": capture(), "log": run.train_log.state_dict()}
    return Snapshot(sections=sections, document=document, rank_document=encode_inline(rank_state), buffers=buffers)


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


# ---- model -----------------------------------------------------------------------------------------------------------


def load_model(run: Run, checkpoint: Checkpoint) -> None:
    """Put the weights back. Collective."""
    tensors = {name: SavedTensor(checkpoint, "model", name) for name in checkpoint.names("model")}
    run.fabric.strategy.load_model_state(run.module, tensors)
