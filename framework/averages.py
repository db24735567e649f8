"""Running averages of a run's weights (EMA, SWA): held beside the weights, evaluated with, saved as their own section.

Each rank averages what it holds: the shards that its strategy gives as canonical state, of fp32 masters where there are
any. An average is never anything else than that. While a module computes with one, the live weights are set aside, and
whoever asks for the state of the run gets them from there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .canonical import canonical_names
from .checkpoint.consolidation import AVERAGES as SECTION
from .checkpoint.plan import Shard
from .checkpoint.read import Checkpoint
from .checkpoint.stored import HeldShard, SavedTensor, StoredTensors, read_piece
from .errors import ConfigurationError
from .model_state import model_state, put_model, shapes_of
from .strategy import parameters_of
from .whole import whole_tensors

if TYPE_CHECKING:
    from .run import Run

# So much is converted at once where weights are of another dtype or on another device than their average.
_CHUNK_ELEMENTS = 1 << 24

_Pairs = tuple[list[Tensor], list[Tensor]]
Combine = Callable[[list[Tensor], list[Tensor], int], None]
"""Takes live tensors into averages, in place; the number says how many updates the averages hold so far."""


@dataclass(frozen=True)
class AverageSettings:
    """What an average is to be."""

    key: str
    """The name under which checkpoints hold it."""
    should_update: Callable[..., bool]
    """Asked with ``step_idx=`` after each applied optimizer step, and with ``epoch_idx=`` at the end of each epoch."""
    combine: Combine
    device: torch.device | None = None
    """Where it is held; None for where the weights are."""
    use_buffers: bool = True
    """Whether buffers of floating dtype are averaged too. Else the module's own are computed with."""
    evaluates: bool = True
    """Whether a fit validates with it."""
    stays: bool = True
    """Whether the module holds it once a fit is over."""
    statistics_batches: int | None = 0
    """Of how many training batches batch statistics are computed at the end of an epoch that updated it; None: all."""


@dataclass
class _Entry:
    """One tensor: its names (several where it is tied), this rank's live piece, and the average of it."""

    names: list[str]
    live: Shard
    own: Tensor
    is_buffer: bool

    def shard(self, tensor: Tensor) -> Shard:
        """Return a tensor as the piece that the live one is."""
        return Shard(tensor, self.live.shape, self.live.offsets)


class Average:
    """A running average of the weights of one run.

    ``count`` is how many updates it holds: with none, there is no average, and it takes no memory. The first update
    copies the weights. What is frozen, and what is of an integer dtype, is not averaged: it is as it is live. What is
    unfrozen joins when the next epoch starts, with the value that it has had so far.
    """

    def __init__(self, settings: AverageSettings, run: Run) -> None:
        self.settings = settings
        self.count = 0
        self.last_epoch = -1
        self._run = run
        self._strategy = run.fabric.strategy
        self.is_rebound = self._strategy.traits.swaps_weights
        """Whether every update finds the live tensors anew, as the strategy has their state on a disk."""
        self._entries: dict[str, _Entry] = {}
        self._loaded: set[str] = set()
        self._aside: dict[str, Tensor] | None = None
        # Averages and live tensors: those of one dtype and device, and those to be converted, in chunks.
        self._direct: _Pairs = [], []
        self._others: list[_Pairs] = []
        # Where buffers stand in these lists, and in their modules.
        self._reread: list[tuple[list[Tensor], int, dict[str, Any], str]] = []

    # ---- what is averaged -----------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Find the live tensors anew, and take in what is trained by now. Collective."""
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
        run, module = self._run, self._run.module
        state, canonical = model_state(self._strategy, module), canonical_names(module)
        # Steps that toggle optimizers freeze what the others train for a while.
        toggled = [] if module.automatic_optimization else run.optimizers
        chosen = {id(parameter) for optimizer in toggled for parameter in parameters_of(optimizer)}
        for own_name, parameter in module.named_parameters(remove_duplicate=False):
            name = canonical(own_name)
            if name in state and (parameter.requires_grad or id(parameter) in chosen or self._keeps(name)):
                yield name, state[name], False
        saved = shapes_of(self._strategy, module)
        for name, (table, key) in _buffers(module).items():
            # Every rank has its own, of which a checkpoint holds those of one.
            if name in saved and (self.settings.use_buffers or self._keeps(name)):
                yield name, Shard.whole(table[key].detach()), True

    def _keeps(self, name: str) -> bool:
        return name in self._loaded or name in self._entries

    def _sort(self) -> None:
        """Tell tensors that meet their average as they are from those to be converted first."""
        self._direct, self._others, self._reread = ([], []), [], []
        buffers = _buffers(self._run.module)
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

    def update(self) -> None:
        """Take the weights in as they are now. Collective where the strategy's state lies on a disk."""
        if not self.count or self.is_rebound:
            self.bind()
        if self.count:
            # A buffer may have been replaced by another tensor, a parameter not.
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
        """Drop live tensors that are copies of what lies on a disk."""
        for entry in self._entries.values():
            entry.live = entry.shard(entry.own)
        self._direct, self._others = ([], []), []

    def keep_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold these values of buffers from now on, by name."""
        for name, tensor in tensors.items():
            known = self._entries.get(name)
            if known is None:
                self._entries[name] = _Entry([name], Shard.whole(tensor), self._new(tensor), True)
            else:
                known.own.copy_(tensor)
        self._sort()

    # ---- in the module --------------------------------------------------------------------------------------------

    @property
    def is_in_module(self) -> bool:
        """Whether the module computes with the averages."""
        return self._aside is not None

    @property
    def needs_all_ranks(self) -> bool:
        """Whether giving weights back takes all ranks."""
        return self._strategy.traits.gathers_loaded and self._run.world.size > 1

    def put_in(self, share_buffers: bool = True) -> None:
        """Let the module compute with the averages; the live weights are set aside. Collective.

        With ``share_buffers`` all ranks get the buffers of one.
        """
        self.bind()
        entries = self._entries.values()
        aside = {entry.names[0]: entry.live.tensor.clone() for entry in entries}
        # From here on the live weights are these, however far the rest comes.
        self._aside = aside
        if self.is_rebound:
            self._let_go()
        self._write({entry.names[0]: entry.own for entry in entries})
        if share_buffers and any(entry.is_buffer for entry in entries):
            self._strategy.sync_buffers(self._run.module)

    def take_out(self) -> None:
        """Give the module its live weights back. Collective."""
        if self._aside is not None:
            self._write(self._aside)
            self._aside = None

    def load_into_module(self, tensors: StoredTensors) -> None:
        """Let the module have weights and buffers that are stored. Collective."""
        put_model(self._strategy, self._run.module, tensors)

    def _write(self, tensors: dict[str, Tensor]) -> None:
        stored = {name: HeldShard(self._entries[name].shard(tensor)) for name, tensor in tensors.items()}
        self.load_into_module(stored)

    def with_live(self, state: dict[str, Shard]) -> dict[str, Shard]:
        """Return a module's canonical state with the live weights in it, also while it computes with averages."""
        if self._aside is None:
            return state
        live = {
            name: self._entries[first].shard(tensor)
            for first, tensor in self._aside.items()
            for name in self._entries[first].names
        }
        return {name: live.get(name, shard) for name, shard in state.items()}

    # ---- in a checkpoint ------------------------------------------------------------------------------------------

    def shards(self) -> dict[str, Shard]:
        """Return this rank's part of the averages, by ``<key>/<parameter or buffer>``."""
        if not self.count:
            return {}
        first = self._strategy.traits.replicates or self._run.world.is_global_zero
        return {
            f"{self.settings.key}/{name}": entry.shard(entry.own)
            for entry in self._entries.values()
            if first or not entry.is_buffer
            for name in entry.names
        }

    def whole_state(self) -> dict[str, Tensor]:
        """Return the module's state dict with averages in it, whole, on rank 0; elsewhere {}. Collective."""
        own = {name: entry.shard(entry.own) for entry in self._entries.values() for name in entry.names}
        state = model_state(self._strategy, self._run.module)
        return dict(whole_tensors({name: own.get(name, shard) for name, shard in state.items()}, self._run.world))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint's document keeps."""
        return {"count": self.count, "last_epoch": self.last_epoch}

    def saved(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> dict[str, SavedTensor]:
        """Return what a checkpoint holds of it, by name; ``names`` are those that tensors were saved by."""
        held = set(checkpoint.names(SECTION)) if SECTION in checkpoint.sections else set()
        keys = {name: f"{self.settings.key}/{saved}" for name, saved in names.items()}
        return {name: SavedTensor(checkpoint, SECTION, key) for name, key in keys.items() if key in held}

    def load(self, tensors: Mapping[str, SavedTensor], state: dict[str, Any]) -> None:
        """Take over what a checkpoint holds, once the live weights were loaded. Collective.

        What it has no average of was not trained then, and is as it is live.
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


def _buffers(module: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Return where each buffer stands, by its canonical name: the table of its module, and the key in that."""
    canonical = canonical_names(module)
    return {
        canonical(f"{prefix}.{key}" if prefix else key): (part._buffers, key)
        for prefix, part in module.named_modules(remove_duplicate=False)
        for key, buffer in part._buffers.items()
        if buffer is not None
    }


class Averages:
    """The averages of a run: those that its callbacks asked for."""

    def __init__(self) -> None:
        self.recompute: Callable[[Average], None] | None = None
        """Computes the batch statistics of an average anew, where the run has training data."""
        self._averages: dict[str, Average] = {}

    def __iter__(self) -> Iterator[Average]:
        return iter(self._averages.values())

    def __len__(self) -> int:
        return len(self._averages)

    def add(self, settings: AverageSettings, run: Run) -> Average:
        """Keep an average from now on.

        Raises:
            ConfigurationError: there is one with that key, or another one is evaluated with.
        """
        if settings.key in self._averages:
            raise ConfigurationError(
                f"two callbacks keep an average named {settings.key!r}, so a checkpoint could not tell them apart: "
                "give one of them another name=."
            )
        for flag, argument in (("evaluates", "evaluate"), ("stays", "average_at_end")):
            rival = next((one.settings.key for one in self if getattr(one.settings, flag)), None)
            if rival is not None and getattr(settings, flag):
                raise ConfigurationError(
                    f"the averages {rival!r} and {settings.key!r} are both to be in the module: give one of their "
                    f"callbacks {argument}=False."
                )
        average = self._averages[settings.key] = Average(settings, run)
        return average

    # ---- while a fit runs -----------------------------------------------------------------------------------------

    def after_step(self, step_idx: int) -> None:
        """Update after an optimizer step that was applied, the ``step_idx``-th from 0."""
        for average in self._averages.values():
            if average.settings.should_update(step_idx=step_idx):
                average.update()

    def begin_epoch(self) -> None:
        """Take note of what is trained from here on. Collective."""
        for average in self:
            if average.count and not average.is_rebound:
                average.bind()

    def end_epoch(self, epoch_idx: int) -> None:
        """Update at the end of a whole epoch, once for each. Collective."""
        for average in self:
            if epoch_idx <= average.last_epoch:
                # It was resumed from a checkpoint saved later than this.
                continue
            average.last_epoch = epoch_idx
            if not average.settings.should_update(epoch_idx=epoch_idx):
                continue
            average.update()
            if average.settings.statistics_batches != 0 and self.recompute is not None:
                self.recompute(average)

    @contextmanager
    def evaluated(self) -> Generator[None, None, None]:
        """Let the module compute with the average that is evaluated with, if there is one by now. Collective.

        After an error on some rank the live weights come back too, unless that takes all ranks.
        """
        average = next((one for one in self if one.settings.evaluates and one.count and not one.is_in_module), None)
        if average is None:
            yield
            return
        try:
            average.put_in()
            yield
        except BaseException:
            if not average.needs_all_ranks:
                average.take_out()
            raise
        average.take_out()

    def stay(self) -> None:
        """Leave the average in the module for good, at the end of a fit. Collective."""
        for average in self:
            if average.settings.stays and average.count:
                average.put_in()

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def with_live(self, state: dict[str, Shard]) -> dict[str, Shard]:
        """Return a module's canonical state with the live weights in it."""
        for average in self:
            state = average.with_live(state)
        return state

    def shards(self) -> dict[str, Shard]:
        """Return this rank's part of all averages, as a checkpoint's section holds them."""
        return {name: shard for average in self for name, shard in average.shards().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint's document keeps."""
        return {average.settings.key: average.state_dict() for average in self}

    def load(self, checkpoint: Checkpoint, names: Mapping[str, str], note: Callable[[str], None]) -> None:
        """Take over what a checkpoint holds of them, once the live weights were loaded. Collective.

        ``names`` says by which name each tensor of the module was saved.
        """
        saved: dict[str, Any] = checkpoint.document.get(SECTION) or {}
        for average in self:
            key = average.settings.key
            if key in saved:
                average.load(average.saved(checkpoint, names), saved[key])
            else:
                note(f"{checkpoint.path} holds no average {key!r}: it begins anew.")
        left = [key for key in saved if key not in self._averages and saved[key]["count"]]
        if left:
            note(f"{checkpoint.path} holds the averages {', '.join(left)}, which no callback keeps up: they are left.")

    def load_into_module(self, checkpoint: Checkpoint, names: Mapping[str, str], note: Callable[[str], None]) -> None:
        """Let a module have what a checkpoint holds of the average that is evaluated with. Collective."""
        average = next((one for one in self if one.settings.evaluates), None)
        if average is None:
            return
        tensors = average.saved(checkpoint, names)
        if tensors:
            average.load_into_module(tensors)
        else:
            note(f"{checkpoint.path} holds no average {average.settings.key!r}: its live weights are used.")
