"""The state of a run as canonical state for a checkpoint; ``restore`` loads it.

Tensors are stored by parameter name; optimizer state by optimizer, slot and parameter name; everything else as JSON.
State that differs between ranks is one document per rank: random generators, values logged in the epoch so far, the
state of a stateful loader. The position in the data is the same on all ranks, and is part of the common document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ..checkpoint.codec import encode, encode_inline
from ..checkpoint.manifest import AVERAGES, JSON
from ..checkpoint.write_plan import CheckpointContents, Shard
from ..core.data_spans import as_json
from ..core.errors import ConfigurationError
from ..core.progress import Progress
from ..data.accumulation_window import Windows
from ..distributed.seed import Generators
from ..parallel.parameter_names import buffer_names, names_of
from ..run.run import Run
from ..state.hyperparameters import class_names, encode_known
from ..state.module_state import extra_state, model_state
from ..state.optimizer_state import Group, optimizer_state, whole
from ..state.user_entries import UserEntries


def live_weights(run: Run) -> dict[str, Shard]:
    """Return this rank's part of the trained weights, also while the module computes with averaged weights.

    Collective.
    """
    return run.averages.with_live(model_state(run.strategy, run.module))


def capture_run(run: Run, windows: Windows | None, seed: int, weights_only: bool) -> CheckpointContents:
    """Return the content of a checkpoint; with ``weights_only`` only the model and its hyperparameters. Collective."""
    state = RunState(run)
    if weights_only:
        return state.weights()
    state.add_training(run, place_of(windows), seed, run.repeated.logger_marks)
    # Hooks may draw random numbers, so the generators come last.
    return replace(state.training(), rank_document=RankState(run, windows).document())


class RunState:
    """The state of a run at one moment, by reference, without a reference to the run itself.

    Tensors are those of the module and its optimizers. The states of callbacks, schedulers and other objects are read
    by ``weights`` and ``training``.
    """

    def __init__(self, run: Run) -> None:
        """Read the weights. Collective."""
        self.holders = StateHolders(run)
        model, base = live_weights(run), run.saver.base
        self._unsaved = {} if base is None else base.left_out(model)
        model = {name: shard for name, shard in model.items() if name not in self._unsaved}
        self._sections: dict[str, dict[str, Shard]] = {"model": model}
        if averages := run.averages.shards():
            self._sections[AVERAGES] = averages
        self._optimizers: dict[str, Shard] = {}
        self._weights_of_training: dict[str, Shard] = {}
        self._document = _described(run)
        self._training: dict[str, Any] = {}
        self._frozen: dict[str, Any] | None = None
        self._user_hooks = run.hooks("on_save_checkpoint")
        self._logger_states = partial(run.loggers.state_dicts, None)
        self._buffers = buffer_names(run.module)

    def add_training(
        self,
        run: Run,
        place: dict[str, Any],
        seed: int,
        marks: list[tuple[str, Any]] | None,
        groups: Sequence[Sequence[Group]] = (),
    ) -> None:
        """Add optimizers and the position in the data. Collective.

        Args:
            place: the position in the data, from ``place_of``.
            seed: the seed of the data order.
            marks: the position of the loggers; None for that of the moment at which ``training`` is called.
            groups: the groups of each optimizer at an earlier moment; empty for the present ones.
        """
        names, strategy = names_of(run.module), run.strategy
        states = [
            optimizer_state(strategy, optimizer, names, index, groups[index] if groups else None)
            for index, optimizer in enumerate(run.optimizers)
        ]
        self._optimizers = {name: shard for _, shards in states for name, shard in shards.items()}
        self._weights_of_training = run.averages.weights_of_training()
        self._logger_states = partial(run.loggers.state_dicts, marks)
        self._training = {
            "optimizers": [described for described, _ in states],
            "schedulers": [type(config.scheduler).__name__ for config in run.schedulers],
            "data_ranks": run.world.data_size,
            **place,
            "seed": seed,
        }

    def go_back(self, document: dict[str, Any], states: dict[str, Any], buffers: Mapping[str, Tensor]) -> None:
        """Use what was read at an earlier moment. Any rank may write the state afterwards.

        Args:
            document: values of the document.
            states: the states of the other objects, from ``StateHolders``.
            buffers: copies of the module's buffers by canonical name.
        """
        self.holders.write_alone()
        self._document |= document
        self._frozen = states
        model = self._sections["model"]
        copies = {name: replace(model[name], tensor=buffers[name]) for name in buffers.keys() & model.keys()}
        self._sections["model"] = {**model, **copies}

    def weights(self) -> CheckpointContents:
        """Return the model and its hyperparameters."""
        document, sections = {**self._document, "weights_only": True}, dict(self._sections)
        if extra := extra_state(self.holders.module):
            document["state"], sections["state"] = self.holders.encoded({"extra": extra})
        return CheckpointContents(sections, document, buffers=self._buffers, left_out=self._unsaved)

    def training(self) -> CheckpointContents:
        """Return the entire state except that of this rank alone; calls ``on_save_checkpoint``."""
        user = UserEntries("on_save_checkpoint")
        for hook in self._user_hooks:
            hook(user)
        document = {**self._document, **self._training, "weights_only": False}
        states = self.holders.states() if self._frozen is None else self._frozen
        document["state"], tensors = self.holders.encoded({**states, "user": dict(user)})
        document["loggers"] = self._logger_states()
        sections = {**self._sections, "optimizer": self._optimizers, "state": tensors}
        if self._weights_of_training:
            sections[AVERAGES] = {**sections.get(AVERAGES, {}), **self._weights_of_training}
        return CheckpointContents(sections, document, buffers=self._buffers, left_out=self._unsaved)


class StateHolders:
    """The objects of a run, beside tensors and optimizers, that have state."""

    def __init__(self, run: Run) -> None:
        self.module = run.module
        self._schedulers, self._scaler = run.schedulers, run.scaler
        self._callbacks = run.callbacks
        self._values, self._measured = run.metrics.values, run.metrics.measured
        self._datamodule = run.context.datamodule
        self._writes = run.world.is_global_zero

    def states(self) -> dict[str, Any]:
        """Return the states by kind."""
        return {
            "schedulers": [config.scheduler.state_dict() for config in self._schedulers],
            "scaler": self._scaler.state_dict() if self._scaler is not None else None,
            "callbacks": {callback.state_key: callback.state_dict() for callback in self._callbacks},
            "extra": extra_state(self.module),
            "datamodule": self._data_state(),
            "metrics": self._values["callback"],
            "measured": self._measured,
            "shown": {reader: self._values[reader] for reader in ("logged", "progress_bar")},
        }

    def _data_state(self) -> dict[str, Any] | None:
        """Return the state of the data module and its class; None without state."""
        state = {} if self._datamodule is None else self._datamodule.state_dict()
        return {"class": type(self._datamodule).__qualname__, "state": state} if state else None

    def write_alone(self) -> None:
        """Make ``encoded`` return the tensors on this rank, for a checkpoint that it saves alone."""
        self._writes = True

    def encoded(self, state: dict[str, Any]) -> tuple[JSON, dict[str, Shard]]:
        """Return a document and the tensors that it refers to, both from rank 0."""
        encoded, tensors = encode(state)
        return encoded, whole(tensors) if self._writes else {}


class RankState:
    """The state of this rank at one moment.

    Within a section that a resumed run repeats, such as a validation, it is the state at the start of the section.
    """

    def __init__(self, run: Run, windows: Windows | None) -> None:
        self._repeated_from, self._group = run.repeated.state, run.world.identical_group
        if self._repeated_from is None:
            # The values that were logged stay on their devices: this may run after each step.
            self._generators, self._log = Generators(), run.train_log.record()
            self._evaluated = dict(run.evaluated_batches)
        # Encoded now, since the loader may change its state in place.
        self._loader_state = None if windows is None else _loader_state(windows)

    def document(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        state = self._repeated_from or {
            "random": self._generators.state(),
            "log": self._log.state_dict(),
            "evaluated": self._evaluated,
        }
        document: dict[str, Any] = {**encode_inline(state), "group": self._group}
        return document if self._loader_state is None else {**document, "data": self._loader_state}


def _loader_state(windows: Windows) -> JSON:
    if (state := windows.source_state()) is None:
        return None
    try:
        return encode_inline(state)
    except ConfigurationError as error:
        windows.source.announce(
            f"The state of {windows.source.name} is not saved, so a resumed run reads it from the start: {error}"
        )
        windows.source.stop_keeping_state()
        return None


def place_of(windows: Windows | None) -> dict[str, Any]:
    """Return the position in the data, as a document holds it, such as ``{"position": {"samples": 640}, ...}``.

    ``windows`` may be None outside of a fit.
    """
    if windows is None:
        return {"position": None, "data": None}
    found = {"micro_batch_size": windows.found_size, "left_out": as_json(windows.excluded_spans) or None}
    return {
        "position": windows.position(),
        "data": windows.source.described(),
        "step_samples": windows.step_samples,
        **{name: value for name, value in found.items() if value is not None},
    }


def counters(progress: Progress, averages: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a document that counts: the progress, and that of the averages if there are any."""
    return {"progress": progress.state_dict(), **({AVERAGES: averages} if averages else {})}


def _described(run: Run) -> dict[str, Any]:
    """Return the part of the document that every checkpoint contains."""
    hparams, unsaved = encode_known(dict(run.module.hparams))
    at_default, container = run.module.hparams_at_default, run.module.hparams_container
    return {
        "module": f"{type(run.module).__module__}.{type(run.module).__qualname__}",
        "hparams": hparams,
        # A module that is built again has the default by itself.
        "unsaved_hparams": [name for name in unsaved if name not in at_default],
        **({"hparams_container": list(container)} if container is not None else {}),
        "class_hparams": class_names(run.module.hparams),
        **({"pretrained": sources} if (sources := list(run.module.pretrained_sources)) else {}),
        **counters(run.progress, run.averages.state_dict()),
        "run": run.directory.identity,
        # For display by tools; no decision depends on them.
        "strategy": run.strategy.name,
        "precision": run.precision.name,
    }


def check_state(run: Run) -> None:
    """Check before training that the states of schedulers, callbacks, modules and the data module can be saved.

    Raises:
        ConfigurationError: a value has a type that cannot be saved; the message names its place.
    """
    encode(StateHolders(run).states())
