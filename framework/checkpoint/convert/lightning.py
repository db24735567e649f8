"""Conversion of Lightning's checkpoints: the ``.ckpt`` file, and the folders of its sharded strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...core.errors import CheckpointError
from ...core.torch_internals import without_wrappers
from ...core.wording import first_of
from .dcp import named_optimizer, read_nested, tensors_of
from .deepspeed import OWN, from_engine, read_engine
from .detect_format import file_of
from .foreign_state import Foreign, ForeignAverage, ForeignProgress, Request, all_bare, renamed
from .parameter_order import build_module, by_name, orders_of, with_kinds

_SCALERS = ("MixedPrecision", "MixedPrecisionPlugin", "native_amp_scaling_state")
_KNOWN = {
    *("epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks", "optimizer_states"),
    *("lr_schedulers", "hparams_name", "hyper_parameters", "hparams_type"),
    *("datamodule_hparams_name", "datamodule_hyper_parameters", "datamodule_hparams_type"),
    *("current_model_state", "averaging_state"),
    *_SCALERS,
}


def convert_file(request: Request) -> Foreign:
    """Read a ``.ckpt`` file.

    Raises:
        CheckpointError: it is not Lightning's, or names are not certain.
    """
    content = request.pickles.load(request.source)
    if not isinstance(content.get("state_dict"), dict) or "pytorch-lightning_version" not in content:
        raise CheckpointError(
            f"{request.source} is not a checkpoint of Lightning: it holds {first_of([str(key) for key in content])}, "
            "where 'state_dict' and 'pytorch-lightning_version' are expected. A file of weights alone is loaded with "
            "torch."
        )
    # A WeightAveraging callback puts the average where the weights are, and the weights elsewhere.
    swapped = isinstance(content.get("current_model_state"), dict)
    weights = all_bare(_tensors(content["current_model_state" if swapped else "state_dict"]))
    foreign = from_trainer(content, weights, "lightning", request)
    if swapped:
        foreign.averages = _averages(content)
    states = content.get("optimizer_states")
    if states is not None:
        module = build_module(request.module, foreign.hparams)
        foreign.optimizers = by_name(
            [renamed(state, without_wrappers) for state in states],
            weights,
            orders_of(module, request.optimizers),
            True,
            foreign.notes,
        )
    return foreign


def convert_sharded(request: Request) -> Foreign:
    """Read a folder of the strategies FSDP and ModelParallel: a folder of torch.distributed.checkpoint and meta.pt."""
    source = request.source
    meta = request.pickles.load(file_of(source, "meta.pt"))
    tree = read_nested(source, request.pickles)
    weights = all_bare(tensors_of(tree.get("state_dict", tree.get("model")), source))
    foreign = from_trainer(meta, weights, "lightning-sharded", request)
    places = sorted((name for name in tree if name.startswith("optimizer_")), key=lambda name: int(name[10:]))
    orders = orders_of(build_module(request.module, foreign.hparams), request.optimizers)
    foreign.optimizers = with_kinds([named_optimizer(tree[place], source) for place in places], orders) or None
    return foreign


def convert_deepspeed(request: Request) -> Foreign:
    """Read a folder of the strategy DeepSpeed: an engine's folder, with all else as its client state."""
    engine = read_engine(request.source / "checkpoint", request)
    built = build_module(request.module, engine.first.get("hyper_parameters") or {})
    model = from_engine(engine, "lightning-deepspeed", replace(request, module=built), "")
    client = {key: value for key, value in engine.first.items() if key not in OWN}
    foreign = from_trainer(client, model.weights, model.format, request)
    foreign.optimizers, foreign.buffers = model.optimizers, model.buffers
    foreign.schedulers = foreign.schedulers or model.schedulers
    foreign.scaler = foreign.scaler or model.scaler
    return foreign


def from_trainer(content: Mapping[str, Any], weights: dict[str, Tensor], format: str, request: Request) -> Foreign:
    """Return all but the optimizers: progress, schedulers, loss scaler, hyperparameters, what the user added."""
    foreign = Foreign(format, weights)
    foreign.progress = progress_of(content, foreign.notes)
    schedulers = content.get("lr_schedulers")
    foreign.schedulers = list(schedulers) if schedulers is not None else None
    if any("num_bad_epochs" in state for state in foreign.schedulers or []) and foreign.progress.epoch_ended:
        foreign.notes.append("Lightning saves before ReduceLROnPlateau has seen the epoch's metric; it misses that one")
    foreign.scaler = next((content[key] for key in _SCALERS if content.get(key)), None)
    foreign.hparams = dict(content.get("hyper_parameters") or {})
    left = request.pickles.left
    foreign.unsaved_hparams = [place[1] for place in left if place[:1] == ("hyper_parameters",) and len(place) == 2]
    if content.get("callbacks"):
        foreign.notes.append(f"left out: the state of Lightning's callbacks {first_of(content['callbacks'])}")
    foreign.notes.append("left out: random generators and the order of shuffled data, which Lightning does not save")
    foreign.user = {key: value for key, value in content.items() if key not in _KNOWN}
    return foreign


def progress_of(content: Mapping[str, Any], notes: list[str]) -> ForeignProgress:
    """Return the progress of the run, from the states of Lightning's loops."""
    progress = ForeignProgress(int(content.get("epoch", 0)), int(content.get("global_step", 0)))
    try:
        loop = content["loops"]["fit_loop"]
        epochs = loop["epoch_progress"]["current"]
        batches = loop["epoch_loop.batch_progress"]
        done, under_way = batches["current"]["processed"], epochs["ready"] > epochs["completed"]
        progress.global_batch = int(batches["total"]["processed"])
        progress.epoch = int(epochs["completed"])
        last = bool(batches["is_last_batch"])
    except (KeyError, TypeError):
        progress.batch_in_epoch = None
        notes.append("the position in the epoch is not in this file: training continues at the epoch's start")
        return progress
    progress.epoch_ended = under_way and last and done >= batches["current"]["ready"] > 0
    progress.batch_in_epoch = int(done) if under_way else 0
    if progress.batch_in_epoch and not progress.epoch_ended:
        notes.append(
            f"the run was in epoch {progress.epoch} after {done} batches of each rank; training continues after as "
            "many: the same samples where the loader does not shuffle and ranks and batch size stay as they were"
        )
    return progress


def _averages(content: Mapping[str, Any]) -> dict[str, ForeignAverage]:
    kinds = content.get("callbacks") or ()
    key = "ema" if any(str(kind).startswith("EMAWeightAveraging") for kind in kinds) else "weight_averaging"
    count = (content.get("averaging_state") or {}).get("n_averaged", 1)
    return {key: ForeignAverage(all_bare(_tensors(content["state_dict"])), int(count))}


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
