"""``CheckpointVerbs``: saving and loading in the canonical format. Nothing is pickled, and nothing that is read is."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint import consolidate, decode, held, save, weights
from ..checkpoint.manifest import MANIFEST
from ..checkpoint.open_on_all_ranks import open_on_all_ranks
from ..core.errors import CheckpointError, ConfigurationError
from ..distributed.collective_errors import on_all_ranks, on_rank_zero
from ..distributed.seed import capture
from ..distributed.seed import restore as restore_generators
from ..parallel.parameter_names import renamed
from ..state.module_state import LENIENT, put_model, shapes_of
from ..state.state_matching import ModelMatch, SavedModel, listed, match_model, refuse
from ..system.atomic_directories import remove_tree
from . import compare, contents_of, is_stateful, parameter_names, restore, snapshot_of
from .module import engine_of, unwrap
from .state import Contents, Filter, Fits, Saved
from .training import TrainingVerbs

Location = str | os.PathLike[str]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class CheckpointVerbs(TrainingVerbs):
    """Saving and loading what a loop is made of."""

    _registered: list[Any]

    def save(self, path: Location, state: Mapping[str, Any], filter: Filter | None = None) -> None:
        """Save a dict as a checkpoint: atomic, checksummed, the same under every strategy. Collective.

        Its values may be modules, optimizers, anything with ``state_dict`` and ``load_state_dict`` (schedulers,
        loaders), and plain values: numbers, strings, lists, dicts, tensors. A single module's tensors have its own
        names, those of several begin with the key. ``filter`` maps a key to a function of name and value that says what
        of a module's or object's state is saved.

        Raises:
            ConfigurationError: a value cannot be kept.
            StorageError: the checkpoint cannot be written; one that was there still is.
        """
        self._save(path, state, filter or {}, None)

    def _save(self, path: Location, state: Mapping[str, Any], kept: Filter, rank_state: Any) -> None:
        contents = contents_of(state, self.strategy)
        steps = max((one.applied for one in self._optimizers()), default=0)
        snapshot = snapshot_of(
            contents, self._names(contents), self._own_state(), steps, kept, rank_state, self.world.is_global_zero
        )
        save(path, snapshot, self.world, sharded=not self.strategy.traits.replicates)

    def load(
        self,
        path: Location,
        state: dict[str, Any] | nn.Module | Optimizer | None = None,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Put a checkpoint's contents back in place and return the rest; without ``state``, all of it. Collective.

        Modules, optimizers and other objects in ``state`` take over what was saved under their key; other values are
        replaced by it. A module or an optimizer alone takes over the only one there is. Checkpoints of a Trainer can be
        read too. With ``strict=False`` what fits is loaded, and a warning names what was left. ``rename`` says what
        took the place of the first parts of tensors' names since they were saved: ``{"net": "body.net"}``.

        Raises:
            CheckpointError: on all ranks; there is no checkpoint, it is damaged, or does not fit. The message lists all
                that does not, and nothing has changed then.
        """
        checkpoint, renames = open_on_all_ranks(self.world, path), rename or {}
        if state is None:
            return on_all_ranks(self.world, lambda: Saved.read(checkpoint, None, renames).remainder(()))

        def compared() -> tuple[dict[str, Any], Contents, Saved, Fits]:
            given = (
                state if isinstance(state, dict) else {_only_key(Saved.read(checkpoint, None, renames), state): state}
            )
            contents = contents_of(given, self.strategy)
            saved = Saved.read(checkpoint, contents, renames)
            return given, contents, saved, compare(saved, contents, self._names(contents), strict)

        given, contents, saved, fits = on_all_ranks(self.world, compared)
        restore(saved, contents, fits, given)
        if contents.optimizers:
            self._load_own_state(saved.own)
        self._tell_left(checkpoint.path, fits.problems)
        return saved.remainder(given)

    def _tell_left(self, path: Path, problems: list[str]) -> None:
        if problems and self.world.is_global_zero:
            warnings.warn(f"of {path} this was left: {listed(problems)}.", stacklevel=3)

    def load_raw(
        self,
        path: Location,
        obj: nn.Module | Optimizer | None = None,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
    ) -> dict[str, Tensor]:
        """Return the weights in a checkpoint or in safetensors files, by name, and put them into ``obj`` if given.

        Collective where there is an ``obj``. ``path`` is a checkpoint, a ``.safetensors`` file, or a directory that
        ``save_model`` or Hugging Face wrote. ``strict`` and ``rename`` are as in ``load``.

        Raises:
            CheckpointError: nothing readable is there, or it does not fit the module; on all ranks, where there is one.
        """

        def read() -> dict[str, Tensor]:
            found = _read_weights(Path(path))
            return {new: found[old] for new, old in renamed(found, rename or {}).items()}

        if obj is None:
            return read()
        if not isinstance(obj, nn.Module):
            raise ConfigurationError("load_raw puts weights into a module; load an optimizer with fabric.load.")
        module = unwrap(obj)
        engine = engine_of(obj)
        strategy = self.strategy if engine is None else engine.strategy

        def compared() -> tuple[dict[str, Tensor], ModelMatch]:
            tensors = read()
            match = match_model(module, shapes_of(strategy, module), SavedModel.held(tensors))
            if strict:
                refuse(Path(path), type(module).__name__, match.problems, LENIENT)
            return tensors, match

        tensors, match = on_all_ranks(self.world, compared)
        put_model(strategy, module, held({name: tensors[name] for name in match.tensors}))
        self._tell_left(Path(path), match.problems)
        return tensors

    # ---- everything at once ---------------------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have ``save_state`` keep further objects, in this order.

        Raises:
            ConfigurationError: one has no ``state_dict`` and ``load_state_dict``.
        """
        for value in objects:
            if not is_stateful(value):
                raise ConfigurationError(
                    f"register_for_checkpointing was given a {type(value).__name__}, which lacks state_dict or "
                    "load_state_dict; give it both."
                )
        self._registered += objects

    def save_state(self, output_dir: Location) -> None:
        """Save all that is set up or registered, and every rank's random generators, as a checkpoint. Collective."""
        self._save(output_dir, self._everything(), {}, {"random": capture()})

    def load_state(self, input_dir: Location) -> None:
        """Put back what ``save_state`` kept; the same things must be set up and registered, in order. Collective.

        Raises:
            CheckpointError: it does not fit; nothing has changed then.
        """
        state = self._everything()
        self.load(input_dir, state)
        documents = open_on_all_ranks(self.world, input_dir, verified=True).rank_documents
        if len(documents) == self.world.size and documents[self.world.rank] is not None:
            restore_generators(decode(documents[self.world.rank])["random"])

    def _everything(self) -> dict[str, Any]:
        groups: dict[str, list[Any]] = {
            "module": [engine.module for engine in self._engines],
            "optimizer": self._optimizers(),
            "scheduler": self._schedulers,
            "loader": self._loaders,
            "object": self._registered,
        }
        return {f"{kind}_{number}": value for kind, values in groups.items() for number, value in enumerate(values)}

    def _names(self, contents: Contents) -> dict[int, str]:
        return parameter_names(contents, [engine.module for engine in self._engines])

    def _own_state(self) -> dict[str, Any]:
        return {
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "windows": {",".join(map(str, key)): window.state_dict() for key, window in self._windows.items()},
            "applied": [one.applied for one in self._optimizers()],
        }

    def _load_own_state(self, own: Mapping[str, Any]) -> None:
        if self.scaler is not None and own.get("scaler") is not None:
            self.scaler.load_state_dict(own["scaler"])
        for key, state in own.get("windows", {}).items():
            numbers = tuple(int(number) for number in key.split(",") if number)
            if all(number < len(self._engines) for number in numbers):
                self._window_of(numbers).load_state_dict(state)
        applied = own.get("applied", ())
        if len(applied) == len(self._optimizers()):
            for one, count in zip(self._optimizers(), applied, strict=True):
                one.applied = int(count)
            for scheduler in self._schedulers:
                scheduler.catch_up()

    # ---- for other programs ---------------------------------------------------------------------------------------

    def save_model(
        self,
        model: nn.Module,
        save_directory: Location,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a module's weights as ``model.safetensors``, or shards and an index, for other programs. Collective.

        Other files in the directory stay; weights that were there are replaced.

        Raises:
            ConfigurationError: ``max_shard_size`` is no size, or a pickle is asked for.
            StorageError: the directory cannot be written.
        """
        if not safe_serialization:
            raise ConfigurationError("safe_serialization=False asks for a pickle, which phalanx does not write.")
        directory = Path(os.path.abspath(save_directory))
        draft = directory / ".saving"
        contents = contents_of({"model": model}, self.strategy)
        snapshot = snapshot_of(contents, {}, {}, 0, {}, None, self.world.is_global_zero)
        self._make(directory)
        save(draft, snapshot, self.world, sharded=not self.strategy.traits.replicates)
        on_rank_zero(self.world, lambda: _publish_weights(draft, directory, max_shard_size))

    def _make(self, directory: Path) -> None:
        def make() -> None:
            directory.mkdir(parents=True, exist_ok=True)

        on_rank_zero(self.world, make)


def _only_key(saved: Saved, value: nn.Module | Optimizer) -> str:
    keys = list(saved.modules) if isinstance(value, nn.Module) else saved.optimizers
    what = "module" if isinstance(value, nn.Module) else "optimizer"
    if len(keys) != 1 and not (what == "optimizer" and not keys):
        raise CheckpointError(
            f"{saved.checkpoint.path} holds {len(keys)} of the kind {what} ({', '.join(keys)}): load a dict that says "
            "which."
        )
    return keys[0] if keys else what


def _publish_weights(draft: Path, directory: Path, max_shard_size: int | str) -> None:
    shards = directory / ".shards"
    try:
        if shards.exists():
            remove_tree(shards)
        consolidate(draft, shards, max_shard_size)
        files = sorted(path.name for path in shards.glob("*.safetensors"))
        single = len(files) == 1
        for name in files:
            os.replace(shards / name, directory / (_SINGLE if single else name))
        if single:
            (directory / _INDEX).unlink(missing_ok=True)
        else:
            os.replace(shards / _INDEX, directory / _INDEX)
        written = {_SINGLE} if single else set(files)
        for path in [*directory.glob("model-*-of-*.safetensors"), directory / _SINGLE]:
            if path.name not in written:
                path.unlink(missing_ok=True)
    finally:
        for leftover in (shards, draft):
            if leftover.exists():
                remove_tree(leftover)


def _read_weights(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.is_dir() and (path / MANIFEST).exists():
        return weights(path)
    files = [path]
    if path.is_dir():
        index = path / _INDEX
        files = [path / _SINGLE]
        if index.exists():
            table: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [path / name for name in sorted(set(table.values()))]
    try:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} holds no weights that can be read ({error}): give a checkpoint, a .safetensors file, or a "
            "directory with model.safetensors."
        ) from error
