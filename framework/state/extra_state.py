"""State of modules other than parameters and buffers: torch's ``get_extra_state`` and ``set_extra_state``.

Used by fp8 layers and quantization. It may be any value that a checkpoint can hold, is stored by the module's canonical
name on rank 0, and is restored after the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..checkpoint.codec import decode
from ..checkpoint.reader import Checkpoint
from ..parallel.parameter_names import canonical_names, renamed


def extra_state(module: nn.Module) -> dict[str, Any]:
    """Return the extra state of a module and its submodules, by canonical name."""
    return {name: part.get_extra_state() for name, part in _keepers(module).items()}


def put_extra_state(module: nn.Module, saved: Mapping[str, Any], renames: Mapping[str, str] | None = None) -> list[str]:
    """Restore extra state; return messages about entries that only one side has. ``renames``: see ``renamed``."""
    keepers, theirs = _keepers(module), renamed(saved, renames or {})
    for name, part in keepers.items():
        if name in theirs:
            part.set_extra_state(saved[theirs[name]])
    return [
        *(f"extra state of {name or 'the module'} is not in the checkpoint" for name in keepers if name not in theirs),
        *(f"extra state of {name or 'the module'} is not in the module" for name in theirs if name not in keepers),
    ]


def saved_extra_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the extra state that a Trainer's checkpoint holds."""
    state = state_of(checkpoint)
    extra: dict[str, Any] = decode(state["extra"], StateTensors(checkpoint)) if state.get("extra") else {}
    return extra


def state_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the part of a checkpoint's document that belongs to its section ``state``, still encoded."""
    state = checkpoint.document.get("state") if isinstance(checkpoint.document, dict) else None
    return state if isinstance(state, dict) else {}


class StateTensors(Mapping[str, Tensor]):
    """The tensors of the section ``state``, each read on demand."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, key: str) -> Tensor:
        return self._checkpoint.read("state", key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.names("state"))

    def __len__(self) -> int:
        return len(self._checkpoint.names("state"))


def _keepers(module: nn.Module) -> dict[str, nn.Module]:
    canonical = canonical_names(module)
    return {
        canonical(name): part
        for name, part in module.named_modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }
