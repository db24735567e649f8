"""``Evidence``: hashes of what a rank computes in the passes of a window, to compare them when they are run again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core.optimizer_config import parameters_of
from ..parallel.compilation import is_compiled
from ..parallel.parameter_names import canonical_names, names_of
from ..run.run import Run
from ..state.state_hashes import Hashes, as_numbers, hash_of
from ..window.passes import Passes


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
            for prefix, part in () if any(map(is_compiled, module.modules())) else module.named_modules():
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
        module, strategy = self._run.module, self._run.strategy
        names = names_of(module)
        found = {f"the loss of micro-batch {number}": loss for number, loss in enumerate(self._losses)}
        canonical = canonical_names(module)
        found |= {f"this rank's gradient of {canonical(name)}": value for name, value in self._own.items()}
        for parameter in (each for optimizer in optimizers for each in parameters_of(optimizer)):
            is_shard = isinstance(parameter, DTensor)
            gradient = parameter.grad if is_shard else strategy.gradients.full(parameter)
            if gradient is not None:
                found[f"the averaged gradient of {names.get(id(parameter), 'a parameter')}"] = hash_of(gradient)
        return as_numbers(found)
