"""Export of a peft model's adapter, alone or merged into its base, under any strategy."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..checkpoint.manifest import MANIFEST
from ..checkpoint.reader import held
from ..checkpoint.safetensors_export import PlainTensors, write_plain
from ..checkpoint.write_plan import Shard
from ..core.arguments import names_arguments
from ..core.errors import ConfigurationError, unknown
from ..distributed.collective_errors import on_rank_zero
from ..distributed.world import World
from ..parallel.blocks import replace_method
from ..parallel.full_tensors import whole_tensors
from ..parallel.meta_device import held_state
from ..parallel.parameter_names import canonical_names, tied_names
from ..pretrained.saving import publish_folder, sync_files
from ..resume.capture import live_weights
from ..system.atomic_directories import remove_tree
from ..system.atomic_files import absolute, hidden_sibling, make_directory, refuse_existing
from .four_bit import restore_weights

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


_CONFIG = "config.json"
"""The file of a base in which peft reads whether the vocabulary was resized."""


@names_arguments
def save_adapter(
    trainer: Trainer, directory: str | os.PathLike[str], adapter: str | None = None, merge: bool = False
) -> Path:
    """Write the adapter of a peft model that a Trainer fits or has fitted; return the directory. Collective in a run.

    The directory holds ``adapter_config.json`` and ``adapter_model.safetensors``, which ``PeftModel.from_pretrained``
    opens; with the embeddings if the adapter targets them or the vocabulary was resized, as peft writes it. In a hook,
    the weights are those after the last optimizer step, in the dtype of its updates; after a fit, those that the module
    of rank 0 holds. Only the tensors that are written are gathered.

    Args:
        trainer: its module contains one ``peft.PeftModel``.
        directory: a directory. In one that exists, as of a run that is resumed, the files of the adapter or model are
            replaced, and other files stay.
        adapter: the name of the adapter. Default: the active one.
        merge: write the base with the adapter added to its weights instead, which ``from_pretrained`` of transformers
            opens. Rank 0 then needs host memory for all weights.

    Raises:
        ConfigurationError: on all ranks; there is no peft model or no such adapter, several adapters are active and
            none is chosen, the directory is a file, holds a model or, with ``merge``, an adapter, or peft cannot export
            or merge adapters of this kind from weights that are given by name.
        StorageError: on all ranks; the files cannot be written.
    """
    target, module, run = absolute(directory), trainer.module, trainer.run
    prefix, model = _peft_model(module)
    name = _adapter_name(model, adapter)
    if run is not None:
        run.check_together("save_adapter")
        world, shards = run.world, live_weights(run)
    elif trainer.is_global_zero:
        state = held_state(module, "save_adapter")
        world, shards = World.single(torch.device("cpu")), {key: Shard.whole(one) for key, one in state.items()}
    else:
        return target
    own = {given[len(prefix) :]: shard for given, shard in shards.items() if given.startswith(prefix)}
    on_rank_zero(world, partial(_check_target, target, merge))
    if merge:
        tensors = dict(whole_tensors(own, world))
        write = partial(_write_merged, model, name, tensors)
    else:
        keys = _adapter_keys(model, own, name)
        wanted = {given: own[given] for given in keys.values() if given in own}
        tensors = dict(whole_tensors(wanted, world))
        write = partial(_write_adapter, model, name, keys, tensors)
    return on_rank_zero(world, partial(_publish, target, write))


def _check_target(target: Path, merge: bool) -> None:
    """Refuse a file, a checkpoint, and a folder in which the two kinds of files would be opened together."""
    if not target.is_dir() or (target / MANIFEST).exists():
        refuse_existing(target)
    other = "adapter_config.json" if merge else "config.json"
    if (target / other).exists():
        raise ConfigurationError(
            f"save_adapter(merge={merge}): {str(target)!r} has {other}, and from_pretrained would add the adapter to "
            "the model in one directory: give another one."
        )


def _peft_model(module: nn.Module) -> tuple[str, Any]:
    """Return the only peft model in a module, and the prefix of its canonical names.

    Raises:
        ConfigurationError: there is none, or more than one.
    """
    try:
        from peft import PeftModel
    except ImportError:
        raise ConfigurationError("save_adapter needs peft: pip install 'peft>=0.18'.") from None

    canonical = canonical_names(module)
    found = [(canonical(f"{name}.") if name else "", part) for name, part in _outermost(module, PeftModel)]
    if len(found) != 1:
        raise ConfigurationError(
            f"save_adapter writes the adapter of one peft.PeftModel, and {type(module).__name__} contains {len(found)}."
        )
    return found[0]


def _outermost(module: nn.Module, kind: type[nn.Module], path: str = "") -> list[tuple[str, nn.Module]]:
    if isinstance(module, kind):
        return [(path, module)]
    found = []
    for name, child in module.named_children():
        found += _outermost(child, kind, f"{path}.{name}" if path else name)
    return found


def _adapter_name(model: Any, given: str | None) -> str:
    if given is None:
        active = [*model.active_adapters]
        if len(active) != 1:
            raise ConfigurationError(
                f"save_adapter writes one adapter, and {', '.join(active) or 'none'} of the model are active: give its "
                f"name, as adapter={str(next(iter(model.peft_config)))!r}, or combine several by add_weighted_adapter."
            )
        return str(active[0])
    if given not in model.peft_config:
        raise unknown("adapter", given, model.peft_config)
    return given


def _adapter_keys(model: Any, shards: Mapping[str, Shard], adapter: str) -> dict[str, str]:
    """Map the names in the adapter's file to those in the model, the same on all ranks.

    Raises:
        ConfigurationError: peft computes tensors of this kind of adapter from others.
    """
    from peft import get_peft_model_state_dict

    canonical = canonical_names(model)
    # Of parameters and buffers, which on some ranks are held by others.
    names = dict.fromkeys([*shards, *(canonical(name) for name, _ in model.named_parameters(remove_duplicate=False))])
    stand_ins = {name: torch.empty(0, device="meta") for name in names}
    by_id = {id(tensor): name for name, tensor in stand_ins.items()}
    with ExitStack() as names_only:
        for part in model.modules():
            # peft asks parts for the names in their state_dict. A strategy that shards them refuses to give the values.
            names_only.callback(replace_method(part, "state_dict", partial(part.state_dict, keep_vars=True)))
        names_only.enter_context(_offline_base(model.peft_config[adapter]))
        found = get_peft_model_state_dict(model, stand_ins, adapter_name=adapter, save_embedding_layers="auto")
    if any(id(tensor) not in by_id for tensor in found.values()):
        raise ConfigurationError(
            f"save_adapter cannot write adapters of peft's {type(model.peft_config[adapter]).__name__}, whose tensors "
            "are computed when they are saved: call save_pretrained of the model after a fit."
        )
    # Tied tensors are held once.
    tied = tied_names(model)
    own = {key: by_id[id(tensor)] for key, tensor in found.items()}
    return {key: name if name in shards else tied.get(name, name) for key, name in own.items()}


def _write_adapter(
    model: Any, adapter: str, keys: Mapping[str, str], tensors: Mapping[str, Tensor], directory: Path
) -> None:
    own = {key: tensors[name] for key, name in keys.items()}
    write_plain(PlainTensors(held(own)), directory, None, "adapter_model")
    config = copy.deepcopy(model.peft_config[adapter])
    config.inference_mode = True
    config.save_pretrained(str(directory))


def _write_merged(model: Any, adapter: str, tensors: dict[str, Tensor], directory: Path) -> None:
    _merged_model(model, adapter, tensors).save_pretrained(str(directory))


def _publish(target: Path, write: Callable[[Path], None]) -> Path:
    """Write a directory under a hidden name, and give it or its files their names when all are complete."""
    temporary = hidden_sibling(target, "tmp")
    make_directory(temporary)
    try:
        write(temporary)
        sync_files(temporary)
        publish_folder(temporary, target)
    except BaseException:
        if temporary.is_dir():
            remove_tree(temporary)
        raise
    return target


# ---- the base -------------------------------------------------------------------------------------------------------


@contextmanager
def _offline_base(config: Any) -> Iterator[None]:
    """Let a ``PeftConfig`` name the base's folder on this machine, or none, so that peft uses no network."""
    given = config.base_model_name_or_path
    config.base_model_name_or_path = _folder_of(given)
    try:
        yield
    finally:
        config.base_model_name_or_path = given


def _folder_of(name: str | None) -> str | None:
    if not name or (Path(name) / _CONFIG).is_file():
        return name
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, _CONFIG)
    except HFValidationError:  # a folder that is no longer there
        return None
    return str(Path(cached).parent) if isinstance(cached, str) else None


def _merged_model(model: Any, adapter: str, weights: dict[str, Tensor]) -> Any:
    """Return the base of a peft model, in which one adapter is merged.

    The model itself is not changed, and may be sharded: a second one is built on the meta device and gets the weights.

    Args:
        model: the peft model.
        adapter: the name of the adapter to merge.
        weights: the full tensors of the model's state by canonical name, on the CPU; they are taken out.

    Raises:
        ConfigurationError: the base is not a model of transformers, a layer with an adapter is tied to another layer,
            or peft cannot merge adapters of this kind.
    """
    from peft import get_peft_model

    _refuse_tied_layers(model)
    base = model.get_base_model()
    if not hasattr(base, "config") or not hasattr(type(base), "_from_config"):
        raise ConfigurationError(
            f"merge=True builds the base again from its config, and {type(base).__name__} is not a model of "
            "transformers: merge it in its own code, from the weights of trainer.export."
        )
    with torch.device("meta"):
        fresh = type(base)._from_config(base.config)
        # With every adapter: the layers of each have names of their own.
        (first, config), *others = model.peft_config.items()
        rebuilt = get_peft_model(fresh, config, adapter_name=first, low_cpu_mem_usage=True)
        for name, other in others:
            rebuilt.add_adapter(name, other, low_cpu_mem_usage=True)
    restore_weights(model, weights)
    # Merging changes weights in place, and those of a model on the CPU may be the ones given.
    own = {name: weights.pop(name).clone() for name in rebuilt.state_dict()}
    rebuilt.load_state_dict(own, strict=True, assign=True)
    # Each tied name got a tensor of its own.
    rebuilt.get_base_model().tie_weights()
    if not hasattr(rebuilt, "merge_and_unload"):
        raise ConfigurationError(
            f"merge=True: peft cannot merge adapters of {type(model.peft_config[adapter]).__name__} into a base."
        )
    try:
        merged = rebuilt.merge_and_unload(adapter_names=[adapter])
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise ConfigurationError(f"merge=True: peft cannot merge the adapter {adapter!r}: {error}") from error
    if getattr(base, "generation_config", None) is not None:
        merged.generation_config = base.generation_config
    return merged


def _refuse_tied_layers(model: Any) -> None:
    tied = tied_names(model)
    uses = Counter(tied.values())
    shared = next((name for name in tied if name.endswith(".base_layer.weight") and uses[tied[name]] > 1), None)
    if shared is not None:
        raise ConfigurationError(
            f"merge=True: {shared} is tied to another layer, which would be changed as well: write the adapter without "
            "merge=True."
        )
