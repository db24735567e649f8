"""The hint for a fit that runs out of memory: what takes it, the largest tensors, and where they were created."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.package_paths import OWN_FOLDERS
from ..core.size_text import size_text

if TYPE_CHECKING:
    from ..run.run import Run

_LARGEST = 5
_TORCH = str(Path(torch.__file__).parent)
_RECORD = (
    "To see the lines that created the largest tensors, call torch.cuda.memory._record_memory_history(stacks='python') "
    "before the fit."
)


def memory_hint(run: Run) -> str:
    """Return the use of memory of a run on this rank, as text. It waits for no device and no other rank."""
    named = list(_named_tensors(run))
    by_kind: Counter[str] = Counter()
    for kind, _, size in named:
        by_kind[kind] += size
    kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in by_kind.most_common())
    lines = [f"Memory on rank {run.world.rank}: {kinds}."]
    if run.device_type == "cuda":
        used = torch.cuda.memory_allocated(run.world.device)
        rest = max(0, used - sum(by_kind.values()))
        lines[0] = f"{lines[0][:-1]}, others such as activations {size_text(rest)}; {size_text(used)} in use."
    largest = sorted(named, key=lambda each: -each[2])[:_LARGEST]
    lines.append("Largest: " + ", ".join(f"{name} {size_text(size)}" for _, name, size in largest) + ".")
    if run.device_type == "cuda":
        recorded = _recorded_lines(run.world.device)
        lines += [f"Created at {where}: {size_text(size)}." for where, size in recorded] or [_RECORD]
    return "\n".join(lines)


def _named_tensors(run: Run) -> Iterator[tuple[str, str, int]]:
    """Yield the kind, the name and the bytes on this rank of each tensor of the model and its optimizers."""
    names: dict[Tensor, str] = {}
    for name, parameter in run.module.named_parameters():
        names[parameter] = name
        yield "parameters", name, _bytes(parameter)
        if parameter.grad is not None:
            yield "gradients", f"gradient of {name}", _bytes(parameter.grad)
    for name, buffer in run.module.named_buffers():
        yield "buffers", name, _bytes(buffer)
    strategy = run.strategy
    for optimizer in run.optimizers:
        # The state that this rank holds, which may be in another optimizer than the user's.
        held = strategy.state.stepping_optimizer(optimizer)
        for trained, slots in held.state.items() if held is not None else ():
            for slot, value in slots.items() if isinstance(slots, Mapping) else ():
                if isinstance(value, Tensor):
                    owner = names.get(trained, "a parameter")
                    yield "optimizer state", f"{slot} of {owner}", _bytes(value)


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of the part of a tensor that this rank holds."""
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local.numel() * local.element_size())


def _recorded_lines(device: torch.device) -> list[tuple[str, int]]:
    """Return the lines of code whose tensors take the most memory, if torch has recorded allocations."""
    try:
        snapshot: Mapping[str, Any] = torch.cuda.memory._snapshot(device)
    except (RuntimeError, AttributeError):  # a build or an allocator without snapshots
        return []
    return largest_lines(snapshot)


def largest_lines(snapshot: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the lines of code whose live tensors take the most bytes, from a snapshot of torch's allocator."""
    found: Counter[str] = Counter()
    for segment in snapshot.get("segments", ()):
        for block in segment.get("blocks", ()):
            frames = block.get("frames") or ()
            if block.get("state") == "active_allocated" and frames:
                found[_place(frames)] += block["size"]
    return found.most_common(_LARGEST)


def _place(frames: Any) -> str:
    """Return the innermost line that is neither torch's nor phalanx's."""
    libraries = (_TORCH, *map(str, OWN_FOLDERS))
    frame = next((each for each in frames if not each["filename"].startswith(libraries)), frames[0])
    return f"{frame['filename']}:{frame['line']} ({frame['name']})"
