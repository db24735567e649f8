"""``convert``: makes a checkpoint of phalanx from one of Lightning, Accelerate or DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from ...core.arguments import names_arguments
from ...core.errors import ConfigurationError
from ...distributed.world import World
from ...system.atomic_files import absolute, make_directory, refuse_existing, storage_error
from ..codec import at
from ..writer import save
from . import accelerate, deepspeed, lightning
from .detect_format import detect
from .foreign_state import Foreign, Request, contents_of
from .pickles import Pickles

_CONVERTERS: dict[str, Callable[[Request], Foreign]] = {
    "lightning": lightning.convert_file,
    "lightning-sharded": lightning.convert_sharded,
    "lightning-deepspeed": lightning.convert_deepspeed,
    "accelerate": accelerate.convert_folder,
    "accelerate-sharded": accelerate.convert_sharded,
    "accelerate-deepspeed": accelerate.convert_deepspeed,
    "deepspeed": deepspeed.convert_folder,
}


@names_arguments
def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: str | None = None,
    *,
    module: nn.Module | type[nn.Module] | None = None,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    prefix: str = "",
    leave_out: Sequence[str] = (),
    trust: bool = False,
    note: Callable[[str], None] = print,
) -> Path:
    """Make a checkpoint of phalanx from one of Lightning, Accelerate or DeepSpeed; return its path.

    The model, the optimizers, schedulers, progress and hyperparameters are carried over, and ``note`` is called for
    what is not. None of the three libraries is needed. Pickles are read with torch's weights-only unpickler, which runs
    nothing that a file names.

    Args:
        source: the foreign file or folder.
        out: the checkpoint to make; nothing may be there.
        format: what ``source`` is, where its files do not show it: ``"lightning"``,
            ``"lightning-sharded"``, ``"lightning-deepspeed"``, ``"accelerate"``, ``"accelerate-sharded"``,
            ``"accelerate-deepspeed"`` or ``"deepspeed"``.
        module: the module that will be trained, or its class, to be built from the saved hyperparameters. Needed where
            the foreign optimizer keeps its state by position and the names are not certain.
        optimizers: the optimizers over ``module``'s parameters, where it has no ``configure_optimizers``.
        prefix: what the names of the foreign model get before them, such as ``"net."``.
        leave_out: names of classes in the foreign pickle whose objects are left out.
        trust: whether a pickle that names other classes is unpickled all the same, which can run any code. Only for
            files whose author you know.
        note: called with a line for each thing that is not carried over; they stay in the checkpoint's document too.

    Raises:
        CheckpointError: the source is not there, unknown or damaged, or names classes that are not read; or it is not
            certain which parameter an optimizer's state is of.
        ConfigurationError: an argument breaks a rule; ``out`` exists, for one.
        StorageError: ``out`` cannot be written.
    """
    origin, target = Path(os.path.realpath(source)), absolute(out)
    kind = detect(origin, format)
    if prefix and kind.startswith("lightning"):
        raise ConfigurationError(f"prefix={prefix!r} was given, but a checkpoint of Lightning has its module's names.")
    refuse_existing(target)
    given = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    pickles = Pickles(trust, leave_out)
    foreign = _CONVERTERS[kind](Request(origin, pickles, module, given, prefix))
    left_out = [f"left out: {at(place)} ({kind})" for place, kind in pickles.left.items()]
    foreign.notes = [*left_out, *foreign.notes]
    try:
        make_directory(target.parent)
        save(target, contents_of(foreign, str(source)), World.single())
    except OSError as error:
        raise storage_error("converting to", target, error) from error
    for line in foreign.notes:
        note(line)
    return target
