"""``Checkpoints``: the part of a Fabric that saves and loads in the canonical format. Nothing is unpickled."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint import decode, held, save
from ..checkpoint.reader import open_on_all_ranks
from ..core.errors import CheckpointError, ConfigurationError
from ..core.wording import a_type, counted
from ..data.stateful_loader import is_stateful
from ..distributed.collective_errors import on_all_ranks
from ..distributed.seed import capture, restore as restore_generators
from ..parallel.parameter_names import renamed
from ..state.module_state import LENIENT, put_model, shapes_of
from ..state.state_matching import ModelMatch, SavedModel, listed, match_model, refuse
from . import compare, contents_of, parameter_names, read_weights, restore, snapshot_of
from .collectives import Ranks
from .contents import Contents, Filter
from .loading import Fits, Saved
from .module import engine_of, unwrap
from .prepared import Prepared
from .training import Training

if TYPE_CHECKING:
    from ..checkpoint.node_folders import NodeFolders

Location = str | os.PathLike[str]
_VALUES = "values"


class Checkpoints:
    """Saves and loads the objects of a loop, one by one or all at once."""

    def __init__(self, ranks: Ranks, prepared: Prepared, training: Training) -> None:
        self._ranks = ranks
        self._prepared = prepared
        self._training = training
        self._registered: list[Any] = []

    def clear(self) -> None:
        """Forget registered objects."""
        self._registered.clear()

    def save(
        self,
        path: Location,
        state: Mapping[str, Any],
        filter: Filter,
        rank_state: Any,
        nodes: NodeFolders | None = None,
    ) -> None:
        """Save a dict, with a state of this rank if it is not None; see ``Fabric.save``. Collective."""
        world, strategy = self._ranks.world, self._prepared.strategy
        contents = contents_of(state, strategy, self._prepared.engines)
        steps = self._prepared.updates
        snapshot = snapshot_of(
            contents, self._names(contents), self._own_state(), steps, filter, rank_state, world.is_global_zero
        )
        when = f"after {counted(steps, 'update')}"
        save(path, snapshot, world, sharded=not strategy.traits.replicates, finite=when, nodes=nodes)

    def load(
        self,
        path: Location,
        state: dict[str, Any] | nn.Module | Optimizer | None,
        strict: bool,
        renames: Mapping[str, str],
    ) -> dict[str, Any]:
        """Load a checkpoint into objects and return the rest; see ``Fabric.load``. Collective."""
        world = self._ranks.world
        checkpoint = open_on_all_ranks(world, path)
        if state is None:
            return on_all_ranks(world, lambda: Saved.read(checkpoint, None, renames).remainder(()))

        def compared() -> tuple[dict[str, Any], Contents, Saved, Fits]:
            given = (
                state if isinstance(state, dict) else {_only_key(Saved.read(checkpoint, None, renames), state): state}
            )
            contents = contents_of(given, self._prepared.strategy, self._prepared.engines)
            saved = Saved.read(checkpoint, contents, renames)
            return given, contents, saved, compare(saved, contents, self._names(contents), strict)

        given, contents, saved, fits = on_all_ranks(world, compared)
        restore(saved, contents, fits, given)
        if contents.optimizers:
            self._load_own_state(saved.own)
        self._warn_not_loaded(checkpoint.path, fits.problems)
        return saved.remainder(given)

    def _warn_not_loaded(self, path: Path, problems: list[str]) -> None:
        if problems and self._ranks.world.is_global_zero:
            # The warning must show the user's line, which is above this method, its caller, the method of the Fabric
            # and the function of ``names_arguments`` around that.
            warnings.warn(f"not loaded from {path}: {listed(problems)}.", stacklevel=5)

    def load_raw(
        self,
        path: Location,
        obj: nn.Module | Optimizer | None,
        strict: bool,
        renames: Mapping[str, str],
    ) -> dict[str, Tensor]:
        """Return the weights in files by name; see ``Fabric.load_raw``. Collective if ``obj`` is given."""

        def read() -> dict[str, Tensor]:
            found = read_weights(Path(path))
            return {new: found[old] for new, old in renamed(found, renames).items()}

        if obj is None:
            return read()
        if not isinstance(obj, nn.Module):
            raise ConfigurationError("load_raw puts weights into a module; load an optimizer with fabric.load.")
        module = unwrap(obj)
        engine = engine_of(obj)
        strategy = self._prepared.strategy if engine is None else engine.strategy

        def compared() -> tuple[dict[str, Tensor], ModelMatch]:
            tensors = read()
            match = match_model(module, shapes_of(strategy, module), SavedModel.held(tensors))
            if strict:
                refuse(Path(path), type(module).__name__, match.problems, LENIENT)
            return tensors, match

        tensors, match = on_all_ranks(self._ranks.world, compared)
        put_model(strategy, module, held({name: tensors[name] for name in match.tensors}))
        self._warn_not_loaded(Path(path), match.problems)
        return tensors

    # ---- all registered objects -----------------------------------------------------------------------------------

    def register(self, objects: Sequence[Any]) -> None:
        """Let ``save_state`` save further objects; see ``Fabric.register_for_checkpointing``."""
        for value in objects:
            if not is_stateful(value):
                raise ConfigurationError(
                    f"register_for_checkpointing was given {a_type(value)}, which lacks state_dict or "
                    "load_state_dict; give it both."
                )
        self._registered += objects

    def save_state(
        self,
        path: Location,
        values: Mapping[str, Any],
        without: Sequence[nn.Module] = (),
        nodes: NodeFolders | None = None,
    ) -> None:
        """Save all objects, every rank's random generators and plain values; see ``Fabric.save_state``. Collective.

        ``nodes``: see ``writer.save``.
        """
        state = {**self._everything(without), **({_VALUES: dict(values)} if values else {})}
        self.save(path, state, {}, {"random": capture()}, nodes)

    def load_state(self, path: Location, values: dict[str, Any], without: Sequence[nn.Module] = ()) -> None:
        """Load what ``save_state`` saved, and update ``values``. Collective.

        Raises:
            CheckpointError: the checkpoint does not match. Raised before anything has changed.
        """
        world = self._ranks.world
        self._check_registered(path)
        values.update(self.load(path, self._everything(without), True, {}).get(_VALUES, {}))
        documents = open_on_all_ranks(world, path, verified=True).rank_documents
        # With another number of ranks there are no matching generators to continue with.
        if len(documents) == world.size and documents[world.rank] is not None:
            restore_generators(decode(documents[world.rank])["random"])

    def _check_registered(self, input_dir: Location) -> None:
        """Refuse a state with more registered objects than there are here."""
        checkpoint = open_on_all_ranks(self._ranks.world, input_dir)
        saved = Saved.read(checkpoint, None, {}).stateful
        held, here = sum(key.startswith("object_") for key in saved), len(self._registered)
        if held > here:
            raise CheckpointError(
                f"{checkpoint.path} holds the states of {counted(held, 'registered object')}, and {here} are "
                "registered here: call register_for_checkpointing with the others before load_state."
            )

    def _everything(self, without: Sequence[nn.Module]) -> dict[str, Any]:
        prepared, left_out = self._prepared, {id(unwrap(module)) for module in without}
        groups: dict[str, list[Any]] = {
            "module": prepared.modules,
            "optimizer": prepared.optimizers,
            "scheduler": prepared.schedulers,
            "loader": prepared.loaders,
            "object": self._registered,
        }
        numbered = ((f"{kind}_{number}", each) for kind, group in groups.items() for number, each in enumerate(group))
        return {key: value for key, value in numbered if id(value) not in left_out}

    def _names(self, contents: Contents) -> dict[int, str]:
        return parameter_names(contents, self._prepared.modules)

    def _own_state(self) -> dict[str, Any]:
        """Return the state of the Fabric itself: loss scale, windows, and how many updates were applied."""
        scaler, windows = self._prepared.scaler, self._training.windows
        return {
            "scaler": None if scaler is None else scaler.state_dict(),
            "windows": {",".join(map(str, key)): window.state_dict() for key, window in windows.items()},
            "applied": [one.applied for one in self._prepared.optimizers],
        }

    def _load_own_state(self, own: Mapping[str, Any]) -> None:
        prepared = self._prepared
        if prepared.scaler is not None and own.get("scaler") is not None:
            prepared.scaler.load_state_dict(own["scaler"])
        for key, state in own.get("windows", {}).items():
            numbers = tuple(int(number) for number in key.split(",") if number)
            if all(number < len(prepared.engines) for number in numbers):
                self._training.window_of(numbers).load_state_dict(state)
        applied, optimizers = own.get("applied", ()), prepared.optimizers
        if len(applied) == len(optimizers):
            for one, count in zip(optimizers, applied, strict=True):
                one.applied = int(count)
            for scheduler in prepared.schedulers:
                scheduler.catch_up()


def _only_key(saved: Saved, value: nn.Module | Optimizer) -> str:
    keys = list(saved.modules) if isinstance(value, nn.Module) else saved.optimizers
    what = "module" if isinstance(value, nn.Module) else "optimizer"
    if len(keys) != 1 and not (what == "optimizer" and not keys):
        raise CheckpointError(
            f"{saved.checkpoint.path} holds {len(keys)} of the kind {what} ({', '.join(keys)}): load a dict that says "
            "which."
        )
    return keys[0] if keys else what
