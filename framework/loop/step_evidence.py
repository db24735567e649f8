"""``Evidence``: hashes of what a rank computes in the passes of a window, to compare them when they are run again.

The hash of a tensor is the exclusive or of the bits of its elements (``torch.hash_tensor``): it changes with any
flipped bit, takes one pass over memory, and does not depend on the order of a sum.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checkpoint.write_plan import Shard
from ..core.optimizer_config import parameters_of
from ..parallel.compilation import is_compiled_by_user
from ..parallel.parameter_names import canonical_names, names_of
from ..run.run import Run
from ..window.passes import Passes

Hashes = dict[str, int]
"""Hashes by what they are of, in the order of computation."""


@torch.no_grad()
def hash_of(tensor: Tensor) -> Tensor:
    """Return the hash of this rank's part of a tensor, as a 0-d tensor of int64 on its device."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    if not local.numel():
        return torch.zeros((), dtype=torch.int64, device=local.device)
    if not local.is_floating_point() or local.element_size() == 1:
        local = local.contiguous().view(-1).view(torch.uint8)
    return torch.hash_tensor(local).view(torch.int64)


def read(hashes: Mapping[str, Tensor]) -> Hashes:
    """Return hashes as numbers; waits for each device once."""
    devices = dict.fromkeys(value.device for value in hashes.values())
    numbers: Hashes = {}
    for device in devices:
        names = [name for name, value in hashes.items() if value.device == device]
        numbers.update(zip(names, torch.stack([hashes[name] for name in names]).tolist(), strict=True))
    return {name: numbers[name] for name in hashes}


def folded(hashes: Mapping[str, int]) -> int:
    """Return one number for hashes and their names, the same in every process."""
    text = repr(sorted(hashes.items())).encode()
    return zlib.crc32(text) << 32 | zlib.adler32(text)


def first_difference(one: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    """Return what is different first, in the order of computation; None without a difference."""
    return next((name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)), None)


class StateHashes:
    """Hashes of the weights and the optimizer state of a run, which only an update changes."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def read(self) -> list[tuple[int, Hashes]]:
        """Return the hashes of this rank's parts, each with a number that ranks with the same part share. Collective.

        The parts are the canonical state, and the weights of which forward passes use a copy.
        """
        run, names = self._run, names_of(self._run.module)
        canonical = canonical_names(run.module)
        parameters = {canonical(name): each for name, each in run.module.named_parameters()}
        found: dict[str, Shard] = {}
        for name, shard in run.strategy.state.model_state(run.module).items():
            # Buffers may change in a forward pass, and differ between ranks.
            if canonical(name) in parameters:
                found[canonical(name)] = shard
        for optimizer in run.optimizers:
            for parameter, slots in run.strategy.state.optimizer_state(optimizer):
                for slot, value in slots.items():
                    if isinstance(value, Shard):
                        found[f"{slot} of {names.get(id(parameter), 'a parameter')}"] = value
        held = {shard.tensor.data_ptr() for shard in found.values()}
        used = {
            f"the copy of {name} for forward passes": Shard.whole(each.detach())
            for name, each in parameters.items()
            if not isinstance(each, DTensor) and each.data_ptr() not in held
        }
        return [
            (
                folded({name: hash((shard.shape, shard.offsets)) for name, shard in part.items()}),
                read({name: hash_of(shard.tensor) for name, shard in part.items()}),
            )
            for part in (found, used)
            if part
        ]


class Evidence:
    """Collects hashes in the passes of a window: of losses, of the gradients of this rank, of reduced gradients."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._losses: list[Tensor] = []
        self._own: dict[str, Tensor] = {}
        self._hooked: set[int] = set()

    def _note_loss(self, loss: Tensor) -> None:
        self._losses.append(hash_of(loss))

    @contextmanager
    def collecting(self, passes: Passes) -> Iterator[None]:
        """Take the losses of passes, and the gradients that they compute on this rank, before they are reduced.

        Hooks are added where a layer uses its parameters: strategies that shard weights replace them for that time.
        """
        module, before = self._run.module, passes.before
        passes.before = (*before, self._note_loss)
        with ExitStack() as hooks:
            hooks.callback(setattr, passes, "before", before)
            # Hooks would make torch compile the module again.
            for prefix, part in () if any(map(is_compiled_by_user, module.modules())) else module.named_modules():
                hook = partial(self._hook, hooks, f"{prefix}." if prefix else "")
                hooks.callback(part.register_forward_pre_hook(hook).remove)
            yield

    def _hook(self, hooks: ExitStack, prefix: str, part: nn.Module, inputs: Any) -> None:
        for name, parameter in part._parameters.items():
            if parameter is None or id(parameter) in self._hooked:
                continue
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                self._hooked.add(id(parameter))
                hooks.callback(parameter.register_hook(partial(self._take, prefix + name)).remove)

    def _take(self, name: str, gradient: Tensor) -> None:
        value = hash_of(gradient)
        before = self._own.get(name)
        # Of several micro-batches: the order matters, so that equal ones do not cancel.
        self._own[name] = value if before is None else before * 3 + value

    def read(self, optimizers: Sequence[Any]) -> Hashes:
        """Return the hashes of the window. Collective."""
        run, names = self._run, names_of(self._run.module)
        found = {f"the loss of micro-batch {number}": loss for number, loss in enumerate(self._losses)}
        canonical = canonical_names(run.module)
        found |= {f"this rank's gradient of {canonical(name)}": value for name, value in self._own.items()}
        for parameter in (each for optimizer in optimizers for each in parameters_of(optimizer)):
            is_shard = isinstance(parameter, DTensor)
            gradient = parameter.grad if is_shard else run.strategy.gradients.full(parameter)
            if gradient is not None:
                found[f"the averaged gradient of {names.get(id(parameter), 'a parameter')}"] = hash_of(gradient)
        return read(found)
