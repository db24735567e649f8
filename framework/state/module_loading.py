"""Rebuilding of a module from a checkpoint: calls its constructor with the saved hyperparameters and loads the weights.

The random generators of this process are restored afterwards, so loading a module does not change later random numbers
of a script.
"""

from __future__ import annotations

import inspect
import warnings
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..checkpoint.codec import decode
from ..checkpoint.fingerprint import fingerprint
from ..checkpoint.manifest import AVERAGES, MODEL
from ..checkpoint.reader import Checkpoint, StoredTensor
from ..checkpoint.safetensors_export import section_tensors, validated_average
from ..checkpoint.safetensors_io import code_of
from ..core.errors import CheckpointError, ConfigurationError, did_you_mean, unknown
from ..core.hyperparameters import AttributeDict
from ..distributed.devices import make_current
from ..distributed.seed import capture, restore
from ..parallel.parameter_names import canonical_table, renamed, state_tensors
from ..parallel.supplied import SuppliedValues
from .frozen_base import refuse_other_base
from .hyperparameters import imported_classes, read_hparams
from .module_state import LENIENT, StateTensors, check_model, put_extra_state, saved_extra_state, state_of
from .state_matching import listed
from .user_entries import UserEntries

Location = str | torch.device | Mapping[str, Any] | Callable[..., Any] | None
"""Values of ``map_location``."""
# The frames from rebuild_module to the user's: its import on the first call, load_from_checkpoint.
_CALLER = 4


def rebuild_module(
    cls: type[Any],
    checkpoint: Checkpoint,
    map_location: Location,
    strict: bool | None,
    overrides: Mapping[str, Any],
    average: str | Literal[False] | None = None,
    hparams_file: str | Path | None = None,
) -> Any:
    """Build ``cls`` with a checkpoint's hyperparameters and load its weights, on the device ``map_location``.

    The module is built on the CPU and moved; each tensor is read directly to its device. With ``strict=False``,
    matching tensors are loaded and a warning names those that are missing, unexpected or of a different shape; None
    stands for the module's ``strict_loading``.
    ``average`` names a weight average to load instead of the weights; None warns of one that the run validates with.
    The hyperparameters in ``hparams_file`` replace those of the checkpoint.

    Raises:
        CheckpointError: the module cannot be built from the checkpoint, or the weights do not match the module.
        ConfigurationError: the device does not exist.
    """
    device = target_device(map_location)
    if "model" not in checkpoint.sections:
        raise CheckpointError(f"{checkpoint.path} holds no weights; it holds: {', '.join(checkpoint.sections)}.")
    if average:
        _check_average(checkpoint, average)
    elif average is None and (validated := validated_average(checkpoint)) is not None:
        warnings.warn(
            f"{checkpoint.path} was validated with the average {validated!r}, and its trained weights are loaded: give "
            f"average={validated!r} to load the average, or average=False for these weights without this warning.",
            stacklevel=_CALLER,
        )
    with kept_generators(device):
        module = _built(cls, checkpoint, overrides, hparams_file)
        if checkpoint.left_out:
            with SuppliedValues():
                module.configure_model()
                module.settle_pretrained()
            module.load_requested()
        else:
            module.configure_model()
            module.drop_pretrained()
        module.to(device)
        _hand_over_user_state(module, checkpoint)
        strict = module.strict_loading if strict is None else strict
        _load(module, checkpoint, strict, f"{AVERAGES}/{average}" if average else MODEL)
    return module


def _check_average(checkpoint: Checkpoint, average: str) -> None:
    names = checkpoint.names(AVERAGES) if AVERAGES in checkpoint.sections else []
    held = sorted({name.partition("/")[0] for name in names})
    if not held:
        raise CheckpointError(f"average={average!r} is not in {checkpoint.path}: it holds no averages.")
    if average not in held:
        raise unknown("average", average, held)


def target_device(given: Location) -> torch.device:
    """Return the device that ``map_location`` names; the CPU for `None`.

    Checkpoints record no devices: a dict must map to one device, and a function is called with an empty storage and
    ``"cpu"``.

    Raises:
        ConfigurationError: the value is not a device, or the device is not available.
    """
    example = "give 'cpu', 'cuda', 'cuda:1', a torch.device or None"
    if isinstance(given, Mapping):
        targets = set(map(str, given.values()))
        if len(targets) != 1:
            raise ConfigurationError(
                f"map_location={given!r} must map to one device, as all tensors go there: {example}."
            )
        given = targets.pop()
    elif callable(given):
        storage = given(torch.UntypedStorage(0), "cpu")
        given = getattr(storage, "device", None)
    if not isinstance(given, str | torch.device | None):
        raise ConfigurationError(f"map_location={given!r} must name one device: {example}.")
    try:
        device = torch.device("cpu" if given is None else given)
    except RuntimeError as error:
        close = did_you_mean(str(given), ["cpu", "cuda", "mps", "xpu"])
        raise ConfigurationError(f"map_location={given!r} is not a device.{close} Please {example}.") from error
    if device.type == "meta":
        raise ConfigurationError(f"map_location={given!r} holds no data, so no weights can go there; {example}.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"map_location={str(given)!r}, but this process sees {torch.cuda.device_count()} CUDA devices; {example}."
        )
    return device


@contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Restore every global generator (Python, numpy, torch on the CPU and on CUDA) when the block ends."""
    if device.type == "cuda":
        # The state captured below must exist: CUDA is initialized on first use.
        torch.cuda.init()
    else:
        make_current(device)
    state = capture()
    try:
        yield
    finally:
        restore(state)


def _built(
    cls: type[Any], checkpoint: Checkpoint, overrides: Mapping[str, Any], hparams_file: str | Path | None
) -> Any:
    document = checkpoint.document if isinstance(checkpoint.document, dict) else {}
    if hparams_file is None:
        saved = _saved_hparams(checkpoint, document)
    else:
        # Nothing of the saved ones is used, so none of them can be missing.
        saved, document = read_hparams(hparams_file), {}
    parameters = inspect.signature(cls.__init__).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in overrides:
        if name not in parameters and not takes_any:
            known = [known for known in parameters if known != "self"]
            raise ConfigurationError(
                f"load_from_checkpoint was given {name}=..., which {cls.__name__}.__init__ does not take."
                f"{did_you_mean(name, known)} It takes: {', '.join(known) or 'nothing'}."
            )
    saved.update(imported_classes(document.get("class_hparams"), parameters))
    arguments = {name: value for name, value in saved.items() if takes_any or name in parameters}
    arguments.update(_in_container(document, saved, parameters))
    arguments.update(overrides)
    missing = [name for name in _unsaved(document) if name not in arguments and (takes_any or name in parameters)]
    if missing:
        raise CheckpointError(
            f"{cls.__name__} was built with {', '.join(missing)}, which {checkpoint.path} does not hold, or names as a "
            f"class that this process has not imported: pass load_from_checkpoint(..., {missing[0]}=...)."
        )
    try:
        return cls(**arguments)
    except TypeError as error:
        raise CheckpointError(
            f"{cls.__name__} cannot be built from {checkpoint.path}: {error}. Pass the missing arguments to "
            "load_from_checkpoint, or call save_hyperparameters() in __init__ before saving."
        ) from error


def _in_container(
    document: Mapping[str, Any], saved: Mapping[str, Any], parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the argument that held all hyperparameters, if there was one and ``__init__`` takes it."""
    name, is_namespace = document.get("hparams_container") or ("", False)
    if name not in parameters:
        return {}
    return {name: Namespace(**saved) if is_namespace else AttributeDict(saved)}


def _saved_hparams(checkpoint: Checkpoint, document: Mapping[str, Any]) -> dict[str, Any]:
    saved = decode(document.get("hparams", {}))
    if not isinstance(saved, dict):
        raise CheckpointError(f"{checkpoint.path} holds hyperparameters that are not a dict; it is damaged.")
    return saved


def _unsaved(document: Mapping[str, Any]) -> list[str]:
    """Return the names of the hyperparameters whose values a checkpoint does not hold."""
    classes = document.get("class_hparams")
    return list(dict.fromkeys([*document.get("unsaved_hparams", []), *(classes if isinstance(classes, dict) else ())]))


def _hand_over_user_state(module: Any, checkpoint: Checkpoint) -> None:
    """Call ``on_load_checkpoint`` with the entries that ``on_save_checkpoint`` added, if the checkpoint has any."""
    user = state_of(checkpoint).get("user")
    if user is not None and hasattr(module, "on_load_checkpoint"):
        module.on_load_checkpoint(UserEntries("on_load_checkpoint", decode(user, StateTensors(checkpoint))))


def _load(module: nn.Module, checkpoint: Checkpoint, strict: bool, section: str) -> None:
    tensors = section_tensors(checkpoint, section)
    table, own = canonical_table(module), state_tensors(module)
    renames = getattr(module, "checkpoint_renames", None)
    if loads_itself(module) or any(
        part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks for part in module.modules()
    ):
        names = renamed(tensors, renames or {})
        _check_base(checkpoint, {name: names[name] for name in table if name in names}, table, own)
        _load_by_method(module, checkpoint, tensors, names, strict)
        return
    shapes = {name: tuple(own[raw].shape) for name, raw in table.items()}
    match = check_model(module, shapes, checkpoint, strict, renames)
    _check_base(checkpoint, match.tensors, table, own)
    with torch.no_grad():
        for name, saved in match.tensors.items():
            if saved in checkpoint.left_out:
                continue
            own[table[name]].copy_(tensors[saved].read())
    left = [*match.problems, *put_extra_state(module, saved_extra_state(checkpoint), renames)]
    if left:
        warnings.warn(
            f"{type(module).__name__} took {len(match.tensors)} of {len(shapes)} tensors from {checkpoint.path}; left "
            f"as they are: {listed(left)}.",
            stacklevel=_CALLER + 1,
        )


def _check_base(
    checkpoint: Checkpoint, names: Mapping[str, str], table: Mapping[str, str], own: Mapping[str, Tensor]
) -> None:
    """Compare a module with the fingerprints of the tensors that a checkpoint leaves out; ``names`` has saved names.

    Raises:
        CheckpointError: the module was built with another base.
    """
    wanted = {name: checkpoint.left_out[saved] for name, saved in names.items() if saved in checkpoint.left_out}
    values = {name: own[table[name]] for name in wanted}
    found = {name: fingerprint(value) for name, value in values.items()}
    refuse_other_base(checkpoint, wanted, found, {name: code_of(one.dtype, name) for name, one in values.items()})


def loads_itself(module: nn.Module) -> bool:
    """Whether a module overrides ``load_state_dict``."""
    return type(module).load_state_dict is not nn.Module.load_state_dict


def _load_by_method(
    module: nn.Module,
    checkpoint: Checkpoint,
    tensors: Mapping[str, StoredTensor],
    names: Mapping[str, str],
    strict: bool,
) -> None:
    """Call ``load_state_dict`` of a module that overrides it, or whose parts have hooks on it.

    Args:
        module: the module.
        checkpoint: the checkpoint. Weights that it leaves out are those of the module.
        tensors: its tensors.
        names: their saved names, by the new ones.
        strict: whether all names must match.

    Raises:
        CheckpointError: the weights do not match the module.
    """
    table, own = canonical_table(module), module.state_dict()
    # torch's layers read their versions in it.
    state: Any = OrderedDict()
    state._metadata = getattr(own, "_metadata", None)
    for name, saved in names.items():
        if saved not in checkpoint.left_out:
            state[table.get(name, name)] = tensors[saved].read()
        elif name in table:
            state[table[name]] = own[table[name]]
    for name, value in saved_extra_state(checkpoint).items():
        state[f"{name}._extra_state" if name else "_extra_state"] = value
    try:
        found = module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        advice = f" {LENIENT}" if strict else ""
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{checkpoint.path} does not fit {type(module).__name__}: {reason}{advice}") from error
    problems = [*getattr(found, "missing_keys", ()), *getattr(found, "unexpected_keys", ())]
    if problems:
        warnings.warn(
            f"{type(module).__name__}.load_state_dict of {checkpoint.path} left out: {listed(problems)}.",
            stacklevel=_CALLER + 2,
        )
