"""Hints for users: the cause of an error of torch or Python in their code, what takes memory, and faster settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.accelerators import used_memory
from ..core.errors import CheckpointError, ConfigurationError, add_hint
from ..core.package_paths import OWN_FOLDERS
from ..core.size_text import size_text
from ..core.split_optimizer import optimizers_in
from ..diagnostics.out_of_memory import is_out_of_memory
from ..run.overrides import is_overridden

if TYPE_CHECKING:
    from ..run.run import Run

_BACKWARD = (
    "If training_step calls loss.backward(), leave the call out: phalanx calls backward on the loss that training_step "
    "returns, unless self.automatic_optimization = False. If it uses a tensor of an earlier step, detach() that tensor."
)
_PICKLE = (
    "Worker processes that are spawned receive the dataset and the functions of a DataLoader by pickling: define them "
    "at the top level of a module, not as a lambda or inside a function, or use multiprocessing_context='fork'."
)
_MOST_SHOWN = 5
_TORCH = str(Path(torch.__file__).parent)
_HOW_TO_RECORD = (
    "To see the lines that created the largest tensors, call torch.cuda.memory._record_memory_history(stacks='python') "
    "before the fit."
)
# The first generation of tensor cores that multiplies in TF32.
_TF32_CAPABILITY = (8, 0)
# Half of the smallest number above zero in fp16: what is less is rounded to zero.
_ZERO_IN_FP16 = 2.0**-25
_WITH_FUSED_FORM = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def add_hints(error: BaseException, stage: str, run: Run | None, is_alone: bool) -> None:
    """Add what a user needs to find the cause of an error that a stage raised.

    Args:
        error: the error.
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        run: the run of the stage; None before it begins.
        is_alone: whether no launcher reports the position of this rank.
    """
    if run is None or not isinstance(error, Exception) or isinstance(error, (ConfigurationError, CheckpointError)):
        return
    if hint := _hint(error, stage, run):
        add_hint(error, hint)
    if is_alone and stage == "fit":
        progress = run.progress
        add_hint(
            error, f"Raised at step {progress.global_step} (epoch {progress.epoch}, batch {progress.batch_in_epoch})."
        )


def _hint(error: Exception, stage: str, run: Run) -> str | None:
    if is_out_of_memory(error):
        return _memory_hint(run)
    text = str(error)
    module = run.module
    if isinstance(error, RuntimeError) and "backward through the graph a second time" in text:
        return _BACKWARD if stage == "fit" and module.automatic_optimization else None
    if "optimizer got an empty parameter list" in text and not any(True for _ in module.parameters()):
        held = [name for name, value in vars(module).items() if _holds_modules(value)]
        where = f": its {', '.join(held)} is a list or dict of Python" if held else ""
        return (
            f"{type(module).__name__} has no parameters{where}. Assign layers to attributes, or put them into "
            "nn.ModuleList or nn.ModuleDict."
        )
    refuses_pickle = type(error).__name__ == "PicklingError" or isinstance(error, AttributeError | TypeError)
    if refuses_pickle and "pickle" in text.lower():
        return _PICKLE
    calls_forward = stage == "predict" and not is_overridden("predict_step", module)
    if calls_forward and isinstance(error, TypeError | AttributeError | IndexError):
        name = type(module).__name__
        return (
            f"{name} has no predict_step, so its forward received the whole batch: if the batch is not just the input, "
            "define predict_step(self, batch, batch_idx), for example to return self(batch[0])."
        )
    return None


def _holds_modules(value: object) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(part, nn.Module) for part in parts)


# ---- memory -------------------------------------------------------------------------------------------------------


def _memory_hint(run: Run) -> str:
    """Return the use of memory of a run on this rank, as text. It waits for no device and no other rank."""
    named = list(_named_tensors(run))
    by_kind: Counter[str] = Counter()
    for kind, _, size in named:
        by_kind[kind] += size
    kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in by_kind.most_common())
    lines = [f"Memory on rank {run.world.rank}: {kinds}."]
    if (used := used_memory(run.world.device)) is not None:
        rest = max(0, used - sum(by_kind.values()))
        lines[0] = f"{lines[0][:-1]}, others such as activations {size_text(rest)}; {size_text(used)} in use."
    largest = sorted(named, key=lambda each: -each[2])[:_MOST_SHOWN]
    lines.append("Largest: " + ", ".join(f"{name} {size_text(size)}" for _, name, size in largest) + ".")
    if run.device_type == "cuda":
        recorded = _recorded_lines()
        lines += [f"Created at {where}: {size_text(size)}." for where, size in recorded] or [_HOW_TO_RECORD]
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
    # Not by the class: importing it takes longer than importing phalanx.
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())


def _recorded_lines() -> list[tuple[str, int]]:
    """Return the lines of code whose tensors take the most memory, if torch has recorded allocations."""
    try:
        segments: Iterable[Mapping[str, Any]] = torch.cuda.memory_snapshot()
    except (RuntimeError, AttributeError):  # a build or an allocator without snapshots
        return []
    return largest_lines(segments)


def largest_lines(segments: Iterable[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Return the lines of code whose live tensors take the most bytes, from a snapshot of torch's allocator."""
    found: Counter[str] = Counter()
    for segment in segments:
        for block in segment.get("blocks", ()):
            frames = block.get("frames") or ()
            if block.get("state") == "active_allocated" and frames:
                found[_place(frames)] += block["size"]
    return found.most_common(_MOST_SHOWN)


def _place(frames: Any) -> str:
    """Return the innermost line that is neither torch's nor phalanx's."""
    libraries = (_TORCH, *map(str, OWN_FOLDERS))
    frame = next((each for each in frames if not each["filename"].startswith(libraries)), frames[0])
    return f"{frame['filename']}:{frame['line']} ({frame['name']})"


# ---- settings of torch -------------------------------------------------------------------------------------------


def device_hints(device: torch.device, computes_in_fp32: bool, optimizers: Iterable[Optimizer]) -> Iterator[str]:
    """Yield a sentence for each setting that could be faster on a GPU, and for an ``eps`` that is zero in fp16.

    Args:
        device: the rank's device.
        computes_in_fp32: whether matrix products are in float32.
        optimizers: those of the module.
    """
    parts = [part for optimizer in optimizers for part in optimizers_in(optimizer)]
    groups = [(part, group) for part in parts for group in part.param_groups if _loses_eps(group)]
    if groups:
        part, group = groups[0]
        yield (
            f"{type(part).__name__}(eps={group['eps']:g}) divides by zero, as its eps is 0 in float16, the dtype of "
            "the weights: use precision='16-mixed' or 'bf16-true', or an eps such as 1e-4."
        )
    if device.type != "cuda":
        return
    is_default = torch.get_float32_matmul_precision() == "highest"
    if computes_in_fp32 and is_default and torch.cuda.get_device_capability(device) >= _TF32_CAPABILITY:
        yield (
            "This GPU multiplies float32 matrices several times as fast in TF32, with 10 bits of precision: call "
            "torch.set_float32_matmul_precision('high') if that suffices."
        )
    slow = [part for part in parts if _could_be_fused(part)]
    if slow:
        yield (
            f"torch.optim.{type(slow[0]).__name__}(fused=True) updates in one pass over the weights, and needs less "
            "memory than the default."
        )


def _could_be_fused(optimizer: Optimizer) -> bool:
    # Any other value than None was chosen by the user.
    is_default = all(group.get(name) is None for group in optimizer.param_groups for name in ("fused", "foreach"))
    return type(optimizer) in _WITH_FUSED_FORM and is_default


def _loses_eps(group: Mapping[str, Any]) -> bool:
    eps = group.get("eps")
    is_lost = isinstance(eps, float) and 0.0 < eps <= _ZERO_IN_FP16
    return is_lost and any(parameter.dtype == torch.float16 for parameter in group["params"])
