"""Parts of a module that Accelerate has placed: on devices of its choice, in the CPU's memory, or on the disk.

Accelerate's hooks bring the weights of such a part to the device that computes with them, and drop them afterwards. In
between its parameters may be on the meta device. No strategy moves or fills these parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def placed_parts(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost placed parts by name; the whole module has the name ``""``."""
    found: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{outer}." if outer else "") for outer in found)
        if not inside and _places(part.__dict__.get("_hf_hook")):
            found[name] = part
    return found


def placed_tensors(module: nn.Module) -> set[int]:
    """Return the ``id`` of each parameter and buffer of the placed parts."""
    return {id(tensor) for part in placed_parts(module).values() for tensor in (*part.parameters(), *part.buffers())}


def move_others(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device, except for its placed parts."""
    if not (outer := placed_parts(module)):
        module.to(device)
        return
    placed = {id(part) for top in outer.values() for part in top.modules()}

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device)

    for part in module.modules():
        if id(part) not in placed:
            part._apply(move, recurse=False)


def _places(hook: Any) -> bool:
    """Whether a hook of Accelerate, or one of a sequence of hooks, brings weights to a device."""
    return any(hasattr(each, "execution_device") for each in getattr(hook, "hooks", (hook,)))
