"""``Saved``: an open checkpoint, matched with the objects to load before anything changes, then loaded into them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..checkpoint.codec import decode
from ..checkpoint.reader import Checkpoint
from ..core.errors import CheckpointError, did_you_mean
from ..core.split_optimizer import kind_of
from ..state.module_state import LENIENT, put_extra_state, put_model, saved_extra_state, shapes_of, stored_of
from ..state.optimizer_state import load_optimizer
from ..state.state_matching import (
    ModelMatch,
    OptimizerMatch,
    SavedModel,
    group_names,
    match_model,
    match_optimizer,
    refuse,
)
from .contents import FABRIC_TABLE, Contents


class ModulePart:
    """One module in a checkpoint: the tensors whose names begin with ``prefix``, which is removed."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, renames: Mapping[str, str]) -> None:
        self.prefix = prefix
        self.saved = SavedModel.of(checkpoint, renames, prefix)
        self._checkpoint = checkpoint

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by their names in the module."""
        return {name: self._checkpoint.read("model", saved) for name, saved in self.saved.names.items()}


@dataclass
class Saved:
    """An open checkpoint of a Fabric or a Trainer."""

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
        """Read everything but the tensors of modules and optimizers; these are read when they are restored.

        A checkpoint of a Trainer, or one converted from another library, has no keys: its model, optimizers and
        schedulers get those of ``contents``, in order. ``renames`` maps first parts of tensor names to current ones.
        """
        document = checkpoint.document
        table = document.get(FABRIC_TABLE)
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
        """Return everything except the keys ``taken``: tensors of modules by name, states as they were saved."""
        rest: dict[str, Any] = {key: part.tensors() for key, part in self.modules.items() if key not in taken}
        rest.update({key: self._optimizer(key) for key in self.optimizers if key not in taken})
        rest.update({key: value for key, value in {**self.stateful, **self.values}.items() if key not in taken})
        return rest

    def described(self, key: str) -> dict[str, Any]:
        """Return the checkpoint's description of an optimizer: groups, hyperparameters, slots."""
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
    """Return the states in a checkpoint without keys for the schedulers of ``contents``, in order."""
    keys = [key for key, value in contents.stateful.items() if isinstance(value, LRScheduler)]
    if not keys or "state" not in checkpoint.document:
        return {}
    state = decode(checkpoint.document["state"], checkpoint.read_section("state"))
    return dict(zip(keys, state["schedulers"], strict=False))


@dataclass
class Fits:
    """The tensors to load into each object, and the mismatches, found before anything changes."""

    modules: dict[str, ModelMatch] = field(default_factory=dict)
    optimizers: dict[str, OptimizerMatch] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def compare(saved: Saved, contents: Contents, names: Mapping[int, str], strict: bool) -> Fits:
    """Match the contents of a checkpoint with the objects to load.

    Raises:
        CheckpointError: there are mismatches, of which the message lists at most 20, and ``strict`` is true.
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
            groups, kind = group_names(optimizer, names), kind_of(optimizer)
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
        # Other libraries save loaders and other objects in their own form, if at all, so these are not loaded.
        held = (*held[:2], *((mine, {*mine, *theirs}) for mine, theirs in held[2:]))
    return [
        f"it holds no {key!r} of that kind.{did_you_mean(key, known)} It holds: {', '.join(known) or 'nothing'}"
        for mine, theirs in held
        for key in mine
        if key not in theirs
    ]


def restore(saved: Saved, contents: Contents, fits: Fits, state: dict[str, Any]) -> None:
    """Load everything that matched into the objects; plain values are replaced in ``state``. Collective."""
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
