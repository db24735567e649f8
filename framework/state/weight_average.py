"""``Average``: a running average of a run's weights (EMA, SWA), sharded like them.

Each rank averages its own part: the shards of canonical state, of fp32 master weights if there are any. While a module
computes with an average, the live weights are stored separately, and checkpoints are saved from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.consolidate import AVERAGES as SECTION
from ..checkpoint.reader import Checkpoint
from ..checkpoint.stored_tensor import HeldShard, SavedTensor, StoredTensors, read_piece
from ..checkpoint.write_plan import Shard
from ..core.optimizer_config import parameters_of
from ..distributed.world import World
from ..parallel.full_tensors import whole_tensors
from ..parallel.parameter_names import canonical_names
from ..parallel.strategy import Strategy
from .average_settings import AverageSettings
from .module_state import buffer_locations, model_state, put_model, shapes_of

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
        held = set(checkpoint.names(SECTION)) if SECTION in checkpoint.sections else set()
        keys = {name: f"{self.settings.key}/{saved}" for name, saved in names.items()}
        return {name: SavedTensor(checkpoint, SECTION, key) for name, key in keys.items() if key in held}

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
