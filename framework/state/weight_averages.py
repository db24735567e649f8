"""Running averages of a run's weights (EMA, SWA), sharded like them, and their section of checkpoints.

Each rank averages its own part: the shards of canonical state, of fp32 master weights if there are any. While a module
computes with an average, the live weights are stored separately, and checkpoints are saved from there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.manifest import AVERAGES as SECTION
from ..checkpoint.reader import Checkpoint, HeldShard, SavedTensor, StoredTensors, read_piece
from ..checkpoint.safetensors_export import validated_average
from ..checkpoint.write_plan import Shard
from ..core.errors import ConfigurationError
from ..core.optimizer_config import parameters_of
from ..distributed.world import World
from ..parallel.full_tensors import whole_tensors
from ..parallel.parameter_names import canonical_names
from ..parallel.strategy import Strategy
from .module_state import buffer_locations, model_state, put_model, shapes_of
from .switched_weights import KEY, SwitchedWeights

Combine = Callable[[list[Tensor], list[Tensor], int], None]
"""Updates averages from live tensors, in place; the number is the count of previous updates."""


@dataclass(frozen=True)
class AverageSettings:
    """The settings of an average."""

    key: str
    """The name in checkpoints."""
    should_update: Callable[..., bool]
    """Whether to update: called with ``step_idx=`` after each applied optimizer step, and with ``epoch_idx=`` after
    each epoch."""
    combine: Combine
    device: torch.device | None = None
    """The device of the average; None for that of the weights."""
    use_buffers: bool = True
    """Whether floating-point buffers are averaged too. If not, the module's own buffers are used."""
    evaluates: bool = True
    """Whether validation during a fit uses the average."""
    stays: bool = True
    """Whether the module has the averaged weights after a fit."""
    statistics_batches: int | None = 0
    """The number of training batches for recomputing batch statistics after an epoch with an update; None: all."""


# The chunk size for conversion if weights have a different dtype or device from their average.
_CHUNK_ELEMENTS = 1 << 24

_Pairs = tuple[list[Tensor], list[Tensor]]


@dataclass
class _Entry:
    """One tensor: its names (several where it is tied), this rank's live piece, and the average of it."""

    names: list[str]
    live: Shard
    own: Tensor
    is_buffer: bool

    def shard(self, tensor: Tensor) -> Shard:
        """Wrap a tensor as the same piece as the live one."""
        return Shard(tensor, self.live.shape, self.live.offsets)


class Average:
    """A running average of the weights of one run.

    ``count`` is the number of updates. Before the first one there is no average and no memory is used; the first update
    copies the weights. Frozen tensors and tensors of an integer dtype are not averaged: their live values are used.
    Unfrozen parameters are added when the next epoch starts, with their present value.
    """

    def __init__(
        self,
        settings: AverageSettings,
        module: nn.Module,
        strategy: Strategy,
        world: World,
        toggled: Callable[[], Sequence[Optimizer]],
    ) -> None:
        self.settings = settings
        self.count = 0
        self.last_epoch = -1
        self._module = module
        self._strategy = strategy
        self._world = world
        self._toggled = toggled
        self.is_rebound = self._strategy.traits.weights_on_disk
        """Whether every update rebinds to the live tensors, because the strategy stores weights on disk."""
        self._entries: dict[str, _Entry] = {}
        self._loaded: set[str] = set()
        self._live_weights: dict[str, Tensor] | None = None
        # Averages and live tensors: those of the same dtype and device, and those to be converted, in chunks.
        self._direct: _Pairs = [], []
        self._others: list[_Pairs] = []
        # The positions of buffers in these lists, and in their modules.
        self._reread: list[tuple[list[Tensor], int, dict[str, Any], str]] = []

    # ---- averaged tensors -----------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Rebind to the current parameters and add newly trainable ones. Collective."""
        firsts: dict[Any, str] = {}
        for name, shard, is_buffer in self._candidates():
            tensor = shard.tensor
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            place = (tensor.device, tensor.data_ptr(), tensor.shape, shard.offsets) if tensor.numel() else name
            first = firsts.setdefault(place, name)
            entry = self._entries.get(first)
            if entry is None:
                entry = self._entries[first] = _Entry([], shard, self._new(tensor), is_buffer)
            elif first == name:
                entry.live = shard
            if name not in entry.names:
                entry.names.append(name)
        self._sort()

    def _new(self, live: Tensor) -> Tensor:
        dtype = torch.promote_types(live.dtype, torch.float32)
        return live.detach().to(self.settings.device or live.device, dtype, copy=True)

    def _candidates(self) -> Iterator[tuple[str, Shard, bool]]:
        module = self._module
        state, canonical = model_state(self._strategy, module), canonical_names(module)
        # Steps that toggle optimizers temporarily freeze the parameters of other optimizers.
        chosen = {id(parameter) for optimizer in self._toggled() for parameter in parameters_of(optimizer)}
        for own_name, parameter in module.named_parameters(remove_duplicate=False):
            name = canonical(own_name)
            if name in state and (parameter.requires_grad or id(parameter) in chosen or self._keeps(name)):
                yield name, state[name], False
        saved = shapes_of(self._strategy, module)
        for name, (table, key) in buffer_locations(module).items():
            # Every rank has its own buffers; a checkpoint holds those of one rank.
            if name in saved and (self.settings.use_buffers or self._keeps(name)):
                yield name, Shard.whole(table[key].detach()), True

    def _keeps(self, name: str) -> bool:
        return name in self._loaded or name in self._entries

    def _sort(self) -> None:
        """Separate tensors with the dtype and device of their average from those that must be converted."""
        self._direct, self._others, self._reread = ([], []), [], []
        buffers = buffer_locations(self._module)
        elements = _CHUNK_ELEMENTS
        for name, entry in self._entries.items():
            own, live = entry.own, entry.live.tensor
            if not own.numel() or (entry.is_buffer and not self.settings.use_buffers):
                continue
            target = self._direct
            if own.dtype != live.dtype or own.device != live.device:
                elements += own.numel()
                if elements > _CHUNK_ELEMENTS:
                    self._others.append(([], []))
                    elements = own.numel()
                target = self._others[-1]
            target[0].append(own)
            target[1].append(live)
            if entry.is_buffer:
                self._reread.append((target[1], len(target[1]) - 1, *buffers[name]))

    # ---- updates --------------------------------------------------------------------------------------------------

    def begin_epoch_end(self, epoch_idx: int) -> bool:
        """Return whether the end of this epoch is new: a checkpoint may have been saved after its update."""
        if epoch_idx <= self.last_epoch:
            return False
        self.last_epoch = epoch_idx
        return True

    def update(self) -> None:
        """Update the average with the current weights. Collective if the strategy stores weights on disk."""
        if not self.count or self.is_rebound:
            self.bind()
        if self.count:
            # A buffer may have been replaced by another tensor; a parameter cannot.
            for lives, index, table, key in self._reread:
                lives[index] = table[key]
            combine, count = self.settings.combine, self.count
            if self._direct[0]:
                combine(*self._direct, count)
            for owns, lives in self._others:
                combine(owns, [live.to(own.device, own.dtype) for own, live in zip(owns, lives, strict=True)], count)
        self.count += 1
        if self.is_rebound:
            self._let_go()

    def _let_go(self) -> None:
        """Drop live tensors that are copies of weights on disk."""
        for entry in self._entries.values():
            entry.live = entry.shard(entry.own)
        self._direct, self._others = ([], []), []

    def keep_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the averaged values of buffers, by name."""
        for name, tensor in tensors.items():
            known = self._entries.get(name)
            if known is None:
                self._entries[name] = _Entry([name], Shard.whole(tensor), self._new(tensor), True)
            else:
                known.own.copy_(tensor)
        self._sort()

    # ---- swapping weights -----------------------------------------------------------------------------------------

    @property
    def is_in_module(self) -> bool:
        """Whether the module computes with the averages."""
        return self._live_weights is not None

    @property
    def needs_all_ranks(self) -> bool:
        """Whether restoring the live weights is a collective."""
        return self._strategy.traits.load_is_collective and self._world.size > 1

    def swap_in(self, share_buffers: bool = True) -> None:
        """Put the averages into the module, and store the live weights. Collective.

        With ``share_buffers``, buffers are synchronized over ranks.
        """
        self.bind()
        entries = self._entries.values()
        aside = {entry.names[0]: entry.live.tensor.clone() for entry in entries}
        # These are the live weights from here, even if the rest of the method fails.
        self._live_weights = aside
        if self.is_rebound:
            self._let_go()
        self._write({entry.names[0]: entry.own for entry in entries})
        if share_buffers and any(entry.is_buffer for entry in entries):
            self._strategy.sync_buffers(self._module)

    def swap_out(self) -> None:
        """Restore the module's live weights. Collective."""
        if self._live_weights is not None:
            self._write(self._live_weights)
            self._live_weights = None

    @contextmanager
    def in_module(self, share_buffers: bool = True) -> Generator[None, None, None]:
        """Use the averages in the module within the context. Collective.

        After an error on a rank the live weights are restored too, unless that is a collective.
        """
        try:
            self.swap_in(share_buffers)
            yield
        except BaseException:
            if not self.needs_all_ranks:
                self.swap_out()
            raise
        self.swap_out()

    def load_into_module(self, tensors: StoredTensors) -> None:
        """Load stored weights and buffers into the module. Collective."""
        put_model(self._strategy, self._module, tensors)

    def _write(self, tensors: dict[str, Tensor]) -> None:
        stored = {name: HeldShard(self._entries[name].shard(tensor)) for name, tensor in tensors.items()}
        self.load_into_module(stored)

    def with_live(self, state: dict[str, Shard]) -> dict[str, Shard]:
        """Return a module's canonical state with the live weights, even while it computes with averages."""
        if self._live_weights is None:
            return state
        live = {
            name: self._entries[first].shard(tensor)
            for first, tensor in self._live_weights.items()
            for name in self._entries[first].names
        }
        return {name: live.get(name, shard) for name, shard in state.items()}

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def shards(self) -> dict[str, Shard]:
        """Return this rank's part of the averages, by ``<key>/<parameter or buffer>``."""
        if not self.count:
            return {}
        first = self._strategy.traits.replicates or self._world.is_global_zero
        return {
            f"{self.settings.key}/{name}": entry.shard(entry.own)
            for entry in self._entries.values()
            if first or not entry.is_buffer
            for name in entry.names
        }

    def whole_state(self) -> dict[str, Tensor]:
        """Return the module's full state dict with the averages on rank 0, and {} on other ranks. Collective."""
        own = {name: entry.shard(entry.own) for entry in self._entries.values() for name in entry.names}
        state = model_state(self._strategy, self._module)
        return dict(whole_tensors({name: own.get(name, shard) for name, shard in state.items()}, self._world))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint's document."""
        return {"count": self.count, "last_epoch": self.last_epoch, "evaluates": self.settings.evaluates}

    def saved(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> dict[str, SavedTensor]:
        """Return the tensors of this average in a checkpoint by name; ``names`` maps names to saved names."""
        return _saved(checkpoint, self.settings.key, names)

    def load(self, tensors: Mapping[str, SavedTensor], state: dict[str, Any]) -> None:
        """Load the average from a checkpoint, after the live weights were loaded. Collective.

        Tensors without an average in the checkpoint were not trained at that time; their live values are used.
        """
        self.count, self.last_epoch = int(state["count"]), int(state["last_epoch"])
        self._entries.clear()
        if not self.count:
            return
        self._loaded = set(tensors)
        self.bind()
        for name, entry in self._entries.items():
            if name in tensors:
                entry.own.copy_(read_piece(tensors[name], entry.live))
        if self.is_rebound:
            self._let_go()


class Averages:
    """The averages of a run, as registered by its callbacks."""

    def __init__(self) -> None:
        self.recompute: Callable[[Average], None] | None = None
        """Recomputes the batch statistics of an average, if the run has training data."""
        self.switched: SwitchedWeights | None = None
        """The weights of optimizers that switch them for evaluation; None if there are no such optimizers."""
        self._averages: dict[str, Average] = {}

    def __iter__(self) -> Iterator[Average]:
        return iter(self._averages.values())

    def __len__(self) -> int:
        return len(self._averages)

    def add(self, average: Average) -> Average:
        """Register an average; return it.

        Raises:
            ConfigurationError: the key is already registered, or another average is used for evaluation.
        """
        settings = average.settings
        if settings.key in (*self._averages, KEY):
            raise ConfigurationError(
                f"two averages are named {settings.key!r}, so a checkpoint could not distinguish them: "
                "give one of them another name=."
            )
        for flag, argument in (("evaluates", "evaluate"), ("stays", "average_at_end")):
            rival = next((one.settings.key for one in self if getattr(one.settings, flag)), None)
            if rival is not None and getattr(settings, flag):
                raise ConfigurationError(
                    f"the averages {rival!r} and {settings.key!r} would both be in the module: give one of their "
                    f"callbacks {argument}=False."
                )
        self._averages[settings.key] = average
        return average

    def use_switched(self, switched: SwitchedWeights) -> None:
        """Evaluate and save the weights to evaluate of these optimizers, if there are any."""
        self.switched = switched if switched else None

    # ---- updates and evaluation -----------------------------------------------------------------------------------

    def after_step(self, step_idx: int) -> None:
        """Update after an optimizer step that was applied, the ``step_idx``-th from 0."""
        for average in self._averages.values():
            if average.settings.should_update(step_idx=step_idx):
                average.update()

    def begin_epoch(self) -> None:
        """Rebind all averages to the parameters that are trained in this epoch. Collective."""
        for average in self:
            if average.count and not average.is_rebound:
                average.bind()

    def end_epoch(self, epoch_idx: int) -> None:
        """Update at the end of a complete epoch, once per epoch. Collective."""
        for average in self:
            if not average.begin_epoch_end(epoch_idx) or not average.settings.should_update(epoch_idx=epoch_idx):
                continue
            average.update()
            if average.settings.statistics_batches != 0 and self.recompute is not None:
                self.recompute(average)

    @contextmanager
    def evaluated(self) -> Generator[None, None, None]:
        """Use the weights to evaluate in the module within the context. Collective.

        They are those of optimizers that switch them, and the evaluation average if there is one. After an error on a
        rank the live weights are restored too, unless that is a collective.
        """
        if self.switched is None:
            with self._averaged():
                yield
            return
        try:
            self.switched.swap_in()
            with self._averaged():
                yield
        finally:
            self.switched.swap_out()

    def _averaged(self) -> AbstractContextManager[None]:
        average = next((one for one in self if one.settings.evaluates and one.count and not one.is_in_module), None)
        return nullcontext() if average is None else average.in_module()

    def keep_in_module(self) -> None:
        """Leave the weights to evaluate in the module permanently, at the end of a fit. Collective."""
        if self.switched is not None:
            self.switched.swap_in()
        for average in self:
            if average.settings.stays and average.count:
                average.swap_in()

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def with_live(self, state: dict[str, Shard]) -> dict[str, Shard]:
        """Return a module's canonical state as a checkpoint holds it: with the live weights, not averages.

        Of optimizers that switch weights, it has those to evaluate. Collective.
        """
        for average in self:
            state = average.with_live(state)
        return state if self.switched is None else self.switched.to_evaluate(state)

    def shards(self) -> dict[str, Shard]:
        """Return this rank's part of all averages, as a checkpoint's section holds them."""
        return {name: shard for average in self for name, shard in average.shards().items()}

    def weights_of_training(self) -> dict[str, Shard]:
        """Return this rank's part of the weights of optimizers that switch them, for the same section. Collective."""
        return {} if self.switched is None else self.switched.shards()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint's document."""
        return {average.settings.key: average.state_dict() for average in self}

    def load(self, checkpoint: Checkpoint, names: Mapping[str, str], note: Callable[[str], None]) -> None:
        """Load the averages from a checkpoint, after the weights and optimizers were loaded. Collective.

        ``names`` maps each tensor of the module to its saved name.
        """
        if self.switched is not None:
            self.switched.load(_saved(checkpoint, KEY, names))
        saved: dict[str, Any] = checkpoint.document.get(SECTION) or {}
        for average in self:
            key = average.settings.key
            if key in saved:
                average.load(average.saved(checkpoint, names), saved[key])
            else:
                note(f"{checkpoint.path} holds no average {key!r}: starting a new average.")
        left = [key for key in saved if key not in self._averages and saved[key]["count"]]
        if left:
            note(f"{checkpoint.path} holds the averages {', '.join(left)}, which no callback maintains: ignored.")

    def load_into_module(self, checkpoint: Checkpoint, names: Mapping[str, str], note: Callable[[str], None]) -> None:
        """Load the evaluation average of a checkpoint into a module. Collective."""
        average = next((one for one in self if one.settings.evaluates), None)
        if average is None:
            if (validated := validated_average(checkpoint)) is not None:
                note(
                    f"{checkpoint.path} was validated with the average {validated!r}, which no callback here has: its "
                    "trained weights are used."
                )
            return
        tensors = average.saved(checkpoint, names)
        if tensors:
            average.load_into_module(tensors)
        else:
            note(f"{checkpoint.path} holds no average {average.settings.key!r}: its live weights are used.")


def _saved(checkpoint: Checkpoint, key: str, names: Mapping[str, str]) -> dict[str, SavedTensor]:
    """Return the tensors of the average ``key`` in a checkpoint by name; none if it was saved without it."""
    held = set(checkpoint.names(SECTION)) if SECTION in checkpoint.sections else set()
    keys = {name: f"{key}/{saved}" for name, saved in names.items()}
    return {name: SavedTensor(checkpoint, SECTION, saved) for name, saved in keys.items() if saved in held}
