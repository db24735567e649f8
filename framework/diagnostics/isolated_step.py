"""Steps without side effects: logs, metrics, random generators and buffers are unchanged."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..api.train_module import TrainModule
from ..core.errors import LoopError
from ..distributed.seed import capture, restore
from ..metrics.torchmetrics_state import metrics_set_aside
from ..parallel.sync_batch_norm import is_collective
from .program_state import ProgramState, is_of_program


@contextmanager
def isolated(
    module: nn.Module, keep_buffers: bool = True, runs_again: bool = False, keep_program: bool = True
) -> Generator[None, None, None]:
    """Run steps without changing logs, metrics, random generators, and what the program keeps; see ``ProgramState``.

    With ``keep_buffers`` buffers keep their values too, except those of layers that compute them over all ranks.
    Without ``keep_program`` the program's own code may change what it keeps, in buffers too.

    Raises:
        LoopError: with ``runs_again``, which says that the step runs for the same batch later, it takes an element from
            an iterator that the module holds.
    """
    log = module.log_to(None) if isinstance(module, TrainModule) else None
    random = capture()
    taken = ProgramState.of(module).take() if keep_program else []
    iterators = _guarded_iterators(module) if runs_again else {}
    buffers = _own_buffers(module, keep_program) if keep_buffers else []
    for part, name, buffer in buffers:
        part._buffers[name] = buffer.clone()
    try:
        with metrics_set_aside(module):
            yield
    finally:
        # The original objects are put back instead of copying values: tensors that autograd saved are not modified.
        for part, name, buffer in buffers:
            part._buffers[name] = buffer
        restore(random)
        for name, iterator in iterators.items():
            setattr(module, name, iterator)
        ProgramState.put_back(taken)
        if isinstance(module, TrainModule):
            module.log_to(log)


class _Guarded:
    """Stands for an iterator of the program's, from which a step that runs twice for a batch must not take anything."""

    def __init__(self, name: str, iterator: Any) -> None:
        self._name, self._iterator = name, iterator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        raise LoopError(
            f"the step takes an element from the iterator self.{self._name}, and here it runs more than once for a "
            "batch: take it in on_train_batch_start, or let the loader give it with the batch."
        )


def _guarded_iterators(module: nn.Module) -> dict[str, Any]:
    found = {name: value for name, value in vars(module).items() if isinstance(value, Iterator)}
    for name, value in found.items():
        setattr(module, name, _Guarded(name, value))
    return found


def _own_buffers(module: nn.Module, of_program: bool) -> list[tuple[nn.Module, str, Tensor]]:
    return [
        (part, name, buffer)
        for part in module.modules()
        if not is_collective(part) and (of_program or not is_of_program(part))
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
