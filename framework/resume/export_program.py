"""Export of a module's ``forward`` as a program of ``torch.export``, which runs without the module's source."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..api.train_module import TrainModule
from ..core.errors import ConfigurationError
from ..core.torch_internals import tree_map
from ..system.atomic_files import new_file, refuse_existing


def export_program(module_class: type[TrainModule], checkpoint: Path, out: Path, average: str | None = None) -> Path:
    """Write the program of a module's ``forward`` in evaluation mode, with the weights of a checkpoint.

    Its inputs are like the module's ``example_input_array``: a tensor, a tuple or list of positional arguments, or a
    dict of keyword arguments. The first dimension of each tensor, the batch, may have any size, if ``forward`` allows
    it and that of the example is larger than 1.

    Args:
        module_class: built with the hyperparameters of the checkpoint.
        out: a file that does not exist yet, to be read by ``torch.export.load``.
        average: the average of the weights to write, such as ``"ema"``, instead of the trained weights.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not match the module.
        ConfigurationError: ``out`` exists, there is no ``example_input_array``, or torch cannot export ``forward``.
        StorageError: the file cannot be written.
    """
    refuse_existing(out)
    if not (isinstance(module_class, type) and issubclass(module_class, TrainModule)):
        raise ConfigurationError(f"{module_class!r} is not a subclass of TrainModule.")
    module = module_class.load_from_checkpoint(checkpoint, average=average or False).eval()
    example = module.example_input_array
    if example is None:
        raise ConfigurationError(
            f"{module_class.__name__} has no example_input_array: set it in __init__ to a batch of forward's input."
        )
    program = _program(module, example)
    with new_file(out) as temporary, temporary.open("xb") as file:
        torch.export.save(program, file)
        file.flush()
        os.fsync(file.fileno())
    return out


def _program(module: TrainModule, example: Any) -> torch.export.ExportedProgram:
    # Of one tensor that is given twice torch would make one input.
    example = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, example)
    named = dict(example) if isinstance(example, Mapping) else {}
    positional = tuple(example) if isinstance(example, tuple | list) else () if named else (example,)
    shapes = tree_map(_sizes, [*positional, *named.values()])
    dynamic = dict(zip(named, shapes, strict=True)) if named else tuple(shapes)
    try:
        with torch.no_grad():
            return torch.export.export(module, positional, named, dynamic_shapes=dynamic)
    except Exception as error:  # torch raises errors of many classes for source that it cannot follow
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigurationError(
            f"torch.export cannot export {type(module).__name__}.forward: {reason.strip()[:200].rstrip('.')}."
        ) from error


def _sizes(leaf: Any) -> Any:
    """Return the dimensions whose size may vary."""
    return {0: torch.export.Dim.AUTO} if isinstance(leaf, Tensor) and leaf.dim() else None
