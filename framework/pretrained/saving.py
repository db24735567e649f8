"""Folders that ``from_pretrained`` of transformers opens, written from a module under any strategy.

If the weights are sharded, each rank first writes its part next to the folder; then rank 0 copies them into the files,
a few megabytes at a time. No rank holds all weights.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.manifest import AVERAGES, MANIFEST, MODEL
from ..checkpoint.reader import HeldShard, StoredTensor, open_checkpoint
from ..checkpoint.safetensors_export import PlainTensors, section_tensors, target_dtype, write_plain
from ..checkpoint.write_plan import CheckpointContents, Shard
from ..checkpoint.writer import save
from ..core.errors import ConfigurationError, StorageError, unknown
from ..core.size_text import size_in_bytes
from ..distributed.collective_errors import on_all_ranks, on_rank_zero
from ..distributed.world import World
from ..parallel.meta_device import check_held
from ..parallel.parameter_names import canonical_names, state_tensors
from ..system.atomic_directories import remove_tree, replace_directory
from ..system.atomic_files import absolute, hidden_sibling, make_directory, storage_error, sync_directory
from .peft_adapters import has_adapters
from .request import places_of, tensor_at
from .transformers_models import is_transformers_model, names_in_model, transformers_models
from .weight_folder import INDEX, SINGLE

Sections = Mapping[str, Mapping[str, Shard]]


@dataclass(frozen=True)
class FolderOrder:
    """The arguments of ``save_pretrained``."""

    directory: Path
    model: nn.Module | None = None
    tokenizer: Any = None
    max_shard_size: int | str = "5GB"
    dtype: str | torch.dtype | None = None
    average: str | None = None


def folder_order(
    directory: str | os.PathLike[str],
    model: nn.Module | None,
    tokenizer: Any,
    max_shard_size: int | str,
    dtype: str | torch.dtype | None,
    average: str | None = None,
) -> FolderOrder:
    """Check the arguments of ``save_pretrained``, and return the order.

    Raises:
        ConfigurationError: one of them is invalid, or the directory is a file or a checkpoint.
    """
    target = absolute(directory)
    target_dtype(dtype)
    size_in_bytes(max_shard_size)
    if (target.exists() and not target.is_dir()) or (target / MANIFEST).exists():
        raise ConfigurationError(f"save_pretrained({str(target)!r}) is a file or a checkpoint: give a folder.")
    if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
        raise ConfigurationError(
            f"save_pretrained(tokenizer={type(tokenizer).__name__}) has no save_pretrained method: give a "
            "tokenizer or a processor of transformers."
        )
    return FolderOrder(target, model, tokenizer, max_shard_size, dtype, average)


def save_folder(world: World, root: nn.Module, sections: Sections, sharded: bool, order: FolderOrder) -> Path:
    """Write a folder from this rank's part of a module's weights. Collective.

    Args:
        world: the ranks.
        root: the module that was set up, which is or contains the model.
        sections: the sections ``"model"`` and ``"averages"``, as in a checkpoint.
        sharded: whether ranks hold parts of the weights.
        order: the arguments of ``save_pretrained``.

    Returns:
        The folder.

    Raises:
        ConfigurationError: on all ranks; there is no such model or average, the model has adapters of peft, or a number
            does not fit into ``dtype``.
        StorageError: on all ranks; the folder cannot be written.
    """
    model, names = on_all_ranks(world, lambda: _chosen(root, sections, order))
    chosen = _of_model(sections, set(names.values()))
    if world.size == 1 or not sharded:
        shards = {**chosen[MODEL], **_of_average(chosen.get(AVERAGES, {}), order.average)}
        tensors: dict[str, StoredTensor] = {name: HeldShard(shard) for name, shard in shards.items()}
        return on_rank_zero(world, lambda: _write(order, model, names, tensors))
    draft = on_rank_zero(world, lambda: hidden_sibling(order.directory, "tmp"))
    save(draft, CheckpointContents(chosen), world, sharded=True)

    def collect() -> Path:
        try:
            section = MODEL if order.average is None else f"{AVERAGES}/{order.average}"
            return _write(order, model, names, section_tensors(open_checkpoint(draft), section))
        finally:
            # If the process is killed, the directory has a name that the next clean-up recognizes.
            with contextlib.suppress(StorageError):
                remove_tree(draft)

    return on_rank_zero(world, collect)


def save_held(root: nn.Module, order: FolderOrder) -> Path:
    """Write a folder from the weights that a module holds in this process; return the folder. Not collective.

    Raises:
        ConfigurationError: the module does not hold its weights here, there is no such model, or it has adapters of
            peft.
        StorageError: the folder cannot be written.
    """
    canonical = canonical_names(root)
    held = {canonical(name): Shard.whole(tensor.detach()) for name, tensor in state_tensors(root).items()}
    model, names = _chosen(root, {MODEL: held}, order)
    tensors = _of_model({MODEL: held}, set(names.values()))[MODEL]
    check_held({name: shard.tensor for name, shard in tensors.items()}, "save_pretrained")
    return _write(order, model, names, {name: HeldShard(shard) for name, shard in tensors.items()})


def _chosen(root: nn.Module, sections: Sections, order: FolderOrder) -> tuple[nn.Module, dict[str, str]]:
    model = _model_of(root, order.model)
    if order.average is not None:
        held = {name.partition("/")[0] for name in sections.get(AVERAGES, {})}
        if order.average not in held:
            raise unknown("average", order.average, held)
    if order.tokenizer is not None and not is_transformers_model(model):
        raise ConfigurationError(f"{type(model).__name__} is not a model of transformers, and takes no tokenizer.")
    if has_adapters(root, model):
        raise ConfigurationError(
            f"save_pretrained cannot write {type(model).__name__}: it has adapters of peft, whose weights transformers "
            "would not find in the folder: add them with peft.get_peft_model, and write the model with "
            "phalanx.hf.save_adapter(trainer, directory, merge=True)."
        )
    return model, file_names(root, model)


def _model_of(root: nn.Module, given: nn.Module | None) -> nn.Module:
    if given is not None:
        if not any(part is given for part in root.modules()):
            raise ConfigurationError(
                f"save_pretrained(model={type(given).__name__}) is not in {type(root).__name__}: give one of its parts."
            )
        return given
    found = transformers_models(root)
    if len(found) != 1:
        raise ConfigurationError(
            f"{type(root).__name__} contains {len(found) or 'no'} models of transformers: give the one to write, as "
            "save_pretrained(directory, model=...); of other modules only the weights are written."
        )
    return found[0]


def file_names(root: nn.Module, model: nn.Module) -> dict[str, str]:
    """Map the name of each tensor in the files to its canonical name in ``root``; of tied ones there is one.

    Raises:
        ConfigurationError: transformers would not find a tensor under its name, or the model ties tensors that
            transformers does not tie.
    """
    at = {(id(part), key): name for name, (part, key) in places_of(root).items()}
    places = places_of(model)
    if is_transformers_model(model):
        kept = _kept_names(model)
        renamed = names_in_model(model, kept, places, f"the {type(model).__name__}")
        wrong = next((name for new, name in renamed.items() if new != name), None)
        if wrong is not None:
            raise ConfigurationError(
                f"transformers would load {wrong!r} of {type(model).__name__} under another name: write the weights "
                "with export(), and convert them with a script."
            )
    else:
        seen: dict[int, str] = {}
        kept = [name for name, place in places.items() if seen.setdefault(id(tensor_at(place)), name) == name]
    return {name: at[id(places[name][0]), places[name][1]] for name in kept}


def _kept_names(model: Any) -> list[str]:
    """Return the names that transformers saves: without tied duplicates and those that the class leaves out."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    canonical = canonical_names(model)
    left_out = set(model._keys_to_ignore_on_save or ())
    # It recognizes tied tensors by their memory, which those of a sharded model do not have in full.
    memory: dict[int, torch.Tensor] = {}
    state = {
        name: memory.setdefault(id(tensor), torch.zeros(1))
        for name, tensor in state_tensors(model).items()
        if canonical(name) not in left_out
    }
    try:
        return [canonical(name) for name in remove_tied_weights_from_state_dict(state, model)]
    except RuntimeError as error:
        raise ConfigurationError(
            f"{type(model).__name__} ties tensors that transformers does not tie when it loads: {error}"
        ) from error


def _of_model(sections: Sections, names: set[str]) -> dict[str, dict[str, Shard]]:
    """Return the sections of the tensors with these names."""
    chosen = {MODEL: {name: shard for name, shard in sections[MODEL].items() if name in names}}
    averages = {name: one for name, one in sections.get(AVERAGES, {}).items() if name.partition("/")[2] in names}
    return {**chosen, AVERAGES: averages} if averages else chosen


def _of_average(averages: Mapping[str, Shard], key: str | None) -> dict[str, Shard]:
    prefix = f"{key}/"
    return {name.removeprefix(prefix): shard for name, shard in averages.items() if key and name.startswith(prefix)}


def _write(order: FolderOrder, model: Any, names: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> Path:
    """Write all files into a hidden folder, then publish them."""
    plain = PlainTensors({name: tensors[full] for name, full in names.items()}, target_dtype(order.dtype))
    finished = hidden_sibling(order.directory, "tmp")
    try:
        make_directory(finished)
        write_weight_files(plain, finished, order.max_shard_size)
        if is_transformers_model(model):
            _write_documents(model, plain, order.tokenizer, finished)
            sync_files(finished)
        publish_folder(finished, order.directory)
    except OSError as error:
        raise storage_error("writing", order.directory, error) from error
    finally:
        if finished.exists():
            remove_tree(finished)
    return order.directory


def _write_documents(model: Any, plain: PlainTensors, tokenizer: Any, folder: Path) -> None:
    config = copy.deepcopy(model.config)
    floating = [plain.dtype(name) for name in plain.names if plain.dtype(name).is_floating_point]
    if floating:
        config.dtype = str(max(floating, key=floating.count)).removeprefix("torch.")
    # Torch's FSDP changes the class of the modules that it shards.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)
    if model.can_generate():
        try:
            model.generation_config.save_pretrained(folder)
        except ValueError as error:
            raise ConfigurationError(
                f"save_pretrained: transformers refuses to write the generation_config of {type(model).__name__}: "
                f"{error}"
            ) from error
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


# ---- files of a folder, and their publication -----------------------------------------------------------------------


def write_weight_files(tensors: PlainTensors, folder: Path, max_shard_size: int | str) -> None:
    """Write ``model.safetensors``, or shards and an index, into a folder that has no such files.

    Raises:
        ConfigurationError: ``max_shard_size`` is not a size, or a number does not fit into the dtype.
        StorageError: a file cannot be written.
    """
    shards = write_plain(tensors, folder / ".shards", max_shard_size)
    files = sorted(shards.glob("*.safetensors"))
    if len(files) == 1:
        os.replace(files[0], folder / SINGLE)
        (shards / INDEX).unlink()
    else:
        for path in (*files, shards / INDEX):
            os.replace(path, folder / path.name)
    shards.rmdir()


def sync_files(folder: Path) -> None:
    """Sync the files in a folder that another library has written."""
    for path in folder.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def publish_folder(finished: Path, folder: Path) -> None:
    """Give a finished folder, whose files are synced, its name.

    If the folder exists, its files are replaced one by one, the index last; then weight files of a model that are not
    needed any more are removed. Its other files stay. Until then the folder cannot be opened, unless one file holds all
    weights before and after.
    """
    if not os.path.lexists(folder):
        replace_directory(finished, folder)
        return
    names = sorted((path.name for path in finished.iterdir()), key=lambda name: (name == INDEX, name))
    has_model = INDEX in names or SINGLE in names
    if INDEX in names or (has_model and (folder / INDEX).exists()):
        # If the process is killed in between, shards of two models must not be opened as one.
        for name in (INDEX, SINGLE):
            (folder / name).unlink(missing_ok=True)
        sync_directory(folder)
    for name in names:
        os.replace(finished / name, folder / name)
    for path in folder.glob("model-*-of-*.safetensors") if has_model else ():
        if path.name not in names:
            path.unlink(missing_ok=True)
    sync_directory(folder)
    finished.rmdir()
