"""What ``Fabric.save`` keeps of a dict of the user's objects, in the canonical form, and how it is put back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..checkpoint.codec import decode, encode, encode_inline
from ..checkpoint.reader import Checkpoint
from ..checkpoint.write_plan import Shard, Snapshot
from ..core.errors import CheckpointError, ConfigurationError, did_you_mean, unknown
from ..parallel.parameter_names import names_of
from ..parallel.strategy import Strategy
from ..state.extra_state import extra_state, put_extra_state, saved_extra_state
from ..state.module_state import LENIENT, encode_known, model_state, put_model, shapes_of, stored_of
from ..state.optimizer_state import load_optimizer, optimizer_state, whole
from ..state.state_matching import (
    ModelMatch,
    OptimizerMatch,
    SavedModel,
    group_names,
    match_model,
    match_optimizer,
    refuse,
)
from .module import engine_of, unwrap
from .objects import FabricOptimizer, FabricScheduler

Filter = Mapping[str, Callable[[str, Any], bool]]

_OWN = "fabric"


@dataclass
class Contents:
    """The values of a user's dict, sorted by what they are."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    strategies: dict[str, Strategy] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    keepers: dict[str, Strategy] = field(default_factory=dict)
    """The strategy that holds each optimizer's state."""
    stateful: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def prefix(self, key: str) -> str:
        """What the names of a module's tensors begin with: nothing where it is the only one."""
        return f"{key}." if len(self.modules) > 1 else ""


def contents_of(state: Mapping[str, Any], strategy: Strategy) -> Contents:
    """Sort the values of a dict; ``strategy`` is that of modules which were not set up.

    Raises:
        ConfigurationError: a key is no string.
    """
    contents = Contents()
    for key, value in state.items():
        if not isinstance(key, str):
            raise ConfigurationError(f"state has the key {key!r}; the keys of what is saved are strings.")
        if isinstance(value, nn.Module):
            engine = engine_of(value)
            contents.modules[key] = unwrap(value)
            contents.strategies[key] = strategy if engine is None else engine.strategy
        elif isinstance(value, Optimizer):
            contents.optimizers[key] = plain_optimizer(value)
            set_up: Any = value
            contents.keepers[key] = set_up.engine.strategy if type(set_up) is FabricOptimizer else strategy
        elif is_stateful(value):
            contents.stateful[key] = value.scheduler if type(value) is FabricScheduler else value
        else:
            contents.values[key] = value
    return contents


def plain_optimizer(optimizer: Any) -> Optimizer:
    """Return the original of an optimizer."""
    original: Optimizer = optimizer.optimizer if type(optimizer) is FabricOptimizer else optimizer
    return original


def is_stateful(value: Any) -> bool:
    """Whether a value has a state of its own that can be put back."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def parameter_names(contents: Contents, others: Iterable[nn.Module]) -> dict[int, str]:
    """Return the names of all parameters: of the modules that are saved, and of others that are set up."""
    names: dict[int, str] = {}
    rest = list(others)
    for number, module in enumerate(rest):
        prefix = f"module_{number}." if len(rest) > 1 else ""
        names.update({identity: prefix + name for identity, name in names_of(module).items()})
    for key, module in contents.modules.items():
        prefix = contents.prefix(key)
        names.update({identity: prefix + name for identity, name in names_of(module).items()})
    return names


# ---- saving ------------------------------------------------------------------------------------------------------


def snapshot_of(
    contents: Contents,
    names: Mapping[int, str],
    own: Mapping[str, Any],
    steps: int,
    kept: Filter,
    rank_state: Any,
    is_global_zero: bool,
) -> Snapshot:
    """Return what a checkpoint keeps. ``own`` is Fabric's state, ``kept`` says by key and name what is left in."""
    known = [*contents.modules, *contents.optimizers, *contents.stateful, *contents.values]
    for key in kept:
        if key not in known:
            raise unknown("filter", key, known)
    shards: dict[str, Shard] = {}
    for key, module in contents.modules.items():
        prefix = contents.prefix(key)
        held = model_state(contents.strategies[key], module)
        found = _filtered({name: shard.tensor for name, shard in held.items()}, kept.get(key))
        shards.update({prefix + name: held[name] for name in found})
    states = [
        optimizer_state(contents.keepers[key], one, names, number)
        for number, (key, one) in enumerate(contents.optimizers.items())
    ]
    stateful = {key: _filtered(value.state_dict(), kept.get(key)) for key, value in contents.stateful.items()}
    extra = {key: extra_state(module) for key, module in contents.modules.items()}
    encoded, tensors = encode({"stateful": stateful, "values": contents.values, "own": dict(own), "extra": extra})
    only = next(iter(contents.modules.values())) if len(contents.modules) == 1 else None
    hparams, _ = encode_known(dict(getattr(only, "hparams", None) or {}))
    return Snapshot(
        sections={
            "model": shards,
            "optimizer": {name: shard for _, each in states for name, shard in each.items()},
            # The document is rank 0's, and so are the tensors that it names.
            "state": whole(tensors) if is_global_zero else {},
        },
        document={
            "module": "" if only is None else f"{type(only).__module__}.{type(only).__qualname__}",
            "hparams": hparams,
            "weights_only": True,
            "progress": {"global_step": steps},
            "optimizers": [described for described, _ in states],
            "state": encoded,
            _OWN: {
                "modules": {key: contents.prefix(key) for key in contents.modules},
                "optimizers": list(contents.optimizers),
            },
        },
        rank_document=None if rank_state is None else encode_inline(rank_state),
    )


def _filtered(state: Mapping[str, Any], keep: Callable[[str, Any], bool] | None) -> dict[str, Any]:
    return {name: value for name, value in state.items() if keep is None or keep(name, value)}


# ---- loading -----------------------------------------------------------------------------------------------------


class ModulePart:
    """The part of a checkpoint that is one module's: the tensors whose names begin with ``prefix``, by what follows."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, renames: Mapping[str, str]) -> None:
        self.prefix = prefix
        self.saved = SavedModel.of(checkpoint, renames, prefix)
        self._checkpoint = checkpoint

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by the module's own names."""
        return {name: self._checkpoint.read("model", saved) for name, saved in self.saved.names.items()}


@dataclass
class Saved:
    """An open checkpoint that Fabric, or a Trainer, has written."""

    checkpoint: Checkpoint
    modules: dict[str, ModulePart]
    optimizers: list[str]
    stateful: dict[str, Any]
    values: dict[str, Any]
    own: dict[str, Any]
    extra: dict[str, dict[str, Any]]
    renames: Mapping[str, str]

    @classmethod
    def read(cls, checkpoint: Checkpoint, contents: Contents | None, renames: Mapping[str, str]) -> Saved:
        """Read all but the tensors of modules and optimizers. ``renames`` are those of ``canonical.renamed``.

        A Trainer's checkpoint, or one made of another library's, has no keys: its model, optimizers and schedulers get
        those of ``contents``, in order.
        """
        document = checkpoint.document
        table = document.get(_OWN)
        if table is not None:
            state = decode(document["state"], checkpoint.read_section("state"))
            parts = {key: ModulePart(checkpoint, prefix, renames) for key, prefix in table["modules"].items()}
            rest = (state["stateful"], state["values"], state["own"], state.get("extra", {}))
            return cls(checkpoint, parts, table["optimizers"], *rest, renames)
        modules = list(contents.modules) if contents is not None else ["model"]
        optimizers = list(contents.optimizers) if contents is not None else []
        held = len(document.get("optimizers", ()))
        if len(modules) > 1 or len(optimizers) > held:
            raise CheckpointError(
                f"{checkpoint.path} holds one model and {held} optimizer(s) without keys; "
                f"{len(modules)} modules and {len(optimizers)} optimizers are to be loaded from it."
            )
        parts = {key: ModulePart(checkpoint, "", renames) for key in modules}
        schedulers = _schedulers_of(checkpoint, contents) if contents is not None else {}
        extra = {key: saved_extra_state(checkpoint) for key in modules}
        return cls(checkpoint, parts, optimizers, schedulers, {}, {}, extra, renames)

    def remainder(self, taken: Iterable[str]) -> dict[str, Any]:
        """Return everything but what was ``taken``: tensors of modules by name, states as they were saved."""
        rest: dict[str, Any] = {key: part.tensors() for key, part in self.modules.items() if key not in taken}
        rest.update({key: self._optimizer(key) for key in self.optimizers if key not in taken})
        rest.update({key: value for key, value in {**self.stateful, **self.values}.items() if key not in taken})
        return rest

    def described(self, key: str) -> dict[str, Any]:
        """Return what the checkpoint says of an optimizer."""
        found: dict[str, Any] = self.checkpoint.document["optimizers"][self.optimizers.index(key)]
        return found

    def _optimizer(self, key: str) -> dict[str, Any]:
        index, saved = self.optimizers.index(key), self.described(key)
        state: dict[str, dict[str, Any]] = {name: dict(slots) for name, slots in decode(saved["scalars"]).items()}
        for path in self.checkpoint.names("optimizer"):
            owner, slot, name = path.split("/", 2)
            if int(owner) == index:
                state.setdefault(name, {})[slot] = self.checkpoint.read("optimizer", path)
        groups = [{**decode(group["hyper"]), "params": group["params"]} for group in saved["groups"]]
        return {"state": state, "param_groups": groups}


def _schedulers_of(checkpoint: Checkpoint, contents: Contents) -> dict[str, Any]:
    """Return what a checkpoint without keys holds for the schedulers of ``contents``."""
    keys = [key for key, value in contents.stateful.items() if isinstance(value, LRScheduler)]
    if not keys or "state" not in checkpoint.document:
        return {}
    state = decode(checkpoint.document["state"], checkpoint.read_section("state"))
    return dict(zip(keys, state["schedulers"], strict=False))


@dataclass
class Fits:
    """What of a checkpoint is put where, and what does not fit, found before anything changes."""

    modules: dict[str, ModelMatch] = field(default_factory=dict)
    optimizers: dict[str, OptimizerMatch] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def compare(saved: Saved, contents: Contents, names: Mapping[int, str], strict: bool) -> Fits:
    """Compare all that is to be loaded with what a checkpoint holds.

    Raises:
        CheckpointError: they differ, and ``strict``; the message lists everything that does.
    """
    fits = Fits(problems=_missing(saved, contents))
    for key, module in contents.modules.items():
        if key in saved.modules:
            part, own = saved.modules[key], shapes_of(contents.strategies[key], module)
            match = fits.modules[key] = match_model(module, own, part.saved)
            label = f"{key}: " if len(contents.modules) > 1 else ""
            fits.problems += [label + problem for problem in match.problems]
    misshapen = {saved.modules[key].prefix + name for key, match in fits.modules.items() for name in match.misshapen}
    for number, (key, optimizer) in enumerate(contents.optimizers.items()):
        if key in saved.optimizers:
            described = saved.described(key)
            label = f"optimizer {number}" if key == "optimizer" else key
            groups, kind = group_names(optimizer, names), type(optimizer).__name__
            fits.optimizers[key] = match_optimizer(label, kind, groups, described, saved.renames, misshapen)
            fits.problems += fits.optimizers[key].problems
    if strict:
        kinds = {type(module).__name__ for module in contents.modules.values()}
        what = kinds.pop() if len(kinds) == 1 else "the state"
        refuse(saved.checkpoint.path, what, fits.problems, LENIENT)
    return fits


def _missing(saved: Saved, contents: Contents) -> list[str]:
    held: tuple[tuple[Collection[str], Collection[str]], ...] = (
        (contents.modules, saved.modules),
        (contents.optimizers, saved.optimizers),
        (contents.stateful, saved.stateful),
        (contents.values, saved.values),
    )
    known = [key for _, theirs in held for key in theirs]
    if "converted" in saved.checkpoint.document:
        # Loaders and objects that another library saved, if at all, in a form of its own stay as they are.
        held = (*held[:2], *((mine, {*mine, *theirs}) for mine, theirs in held[2:]))
    return [
        f"it holds no {key!r} of that kind.{did_you_mean(key, known)} It holds: {', '.join(known) or 'nothing'}"
        for mine, theirs in held
        for key in mine
        if key not in theirs
    ]


def restore(saved: Saved, contents: Contents, fits: Fits, state: dict[str, Any]) -> None:
    """Put everything that fits back in place; values that are no objects are replaced in ``state``. Collective."""
    checkpoint = saved.checkpoint
    for key, match in fits.modules.items():
        put_model(contents.strategies[key], contents.modules[key], stored_of(checkpoint, match))
        fits.problems += put_extra_state(contents.modules[key], saved.extra.get(key, {}), saved.renames)
    for key, fit in fits.optimizers.items():
        described, index = saved.described(key), saved.optimizers.index(key)
        load_optimizer(contents.keepers[key], contents.optimizers[key], described, fit, checkpoint, index)
    for key, value in contents.stateful.items():
        if key in saved.stateful:
            value.load_state_dict(saved.stateful[key])
    state.update({key: saved.values[key] for key in contents.values if key in saved.values})
