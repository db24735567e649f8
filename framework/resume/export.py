"""Export of the weights to plain safetensors, from the ranks during a fit or from the module afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ..checkpoint.manifest import MODEL
from ..checkpoint.reader import HeldShard, StoredTensor, held, open_checkpoint
from ..checkpoint.safetensors_export import PlainTensors, check_target, section_tensors, target_dtype, write_plain
from ..checkpoint.write_plan import CheckpointContents
from ..checkpoint.writer import save
from ..core.errors import StorageError
from ..core.size_text import size_in_bytes
from ..distributed.collective_errors import on_rank_zero
from ..parallel.meta_device import held_state
from ..run.run import Run
from ..system.atomic_directories import remove_tree
from ..system.atomic_files import hidden_sibling
from .capture import live_weights

Dtype = str | torch.dtype | None
Size = int | str | None


def check_export(dtype: Dtype, max_shard_size: Size) -> None:
    """Check the dtype and the shard size of an export.

    Raises:
        ConfigurationError: ``dtype`` is not a supported dtype, or the size is invalid.
    """
    target_dtype(dtype)
    if max_shard_size is not None:
        size_in_bytes(max_shard_size)


def export_run(run: Run, path: Path, dtype: Dtype, max_shard_size: Size) -> Path:
    """Write the weights of a run in progress. Collective.

    If the weights are sharded, each rank first writes its part next to ``path``, so that no rank ever holds all
    weights.

    Raises:
        ConfigurationError: on all ranks; ``path`` exists and holds no weights, or a number does not fit into ``dtype``.
        StorageError: on all ranks; the files cannot be written.
    """
    check_export(dtype, max_shard_size)
    world, shards = run.world, live_weights(run)
    if world.size == 1 or run.traits.replicates:
        # One rank of a strategy that splits flattened tensors holds pieces that are 1-d, though they are complete.
        tensors: dict[str, StoredTensor] = {name: HeldShard(shard) for name, shard in shards.items()}
        return on_rank_zero(world, lambda: _write(tensors, path, dtype, max_shard_size))

    def draft_name() -> Path:
        check_target(path, max_shard_size is not None, replaces=True)
        return hidden_sibling(path, "tmp")

    draft = on_rank_zero(world, draft_name)
    save(draft, CheckpointContents({MODEL: shards}), world, sharded=True)

    def gather() -> Path:
        try:
            tensors = section_tensors(open_checkpoint(draft), MODEL)
            return _write(tensors, path, dtype, max_shard_size)
        finally:
            # If the process is killed, the directory has a name that the next clean-up recognizes.
            with contextlib.suppress(StorageError):
                remove_tree(draft)

    return on_rank_zero(world, gather)


def export_module(module: nn.Module, path: Path, dtype: Dtype, max_shard_size: Size) -> Path:
    """Write the weights that a module holds in this process.

    Raises:
        ConfigurationError: the module holds no weights in this process, ``path`` exists and holds none, or a number
            does not fit into ``dtype``.
        StorageError: the files cannot be written.
    """
    check_export(dtype, max_shard_size)
    tensors = held_state(module, "export", ", or consolidate a checkpoint")
    return _write(held(tensors), path, dtype, max_shard_size)


def _write(tensors: Mapping[str, StoredTensor], path: Path, dtype: Dtype, max_shard_size: Size) -> Path:
    return write_plain(PlainTensors(tensors, target_dtype(dtype)), path, max_shard_size, replaces=True)
