"""How often ranks talk: once for the gradients of an optimizer step, twice for control, once for an epoch's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from phalanx.framework.distributed.shared_memory_reduce import Board, Posted, TensorSums


class Chatty(Regressor):
    """Logs a number of names in each step, for the step and for the epoch."""

    def __init__(self, names: int) -> None:
        super().__init__()
        self.names = [f"name{index}" for index in range(names)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for name in self.names:
            self.log(name, loss, on_step=True, on_epoch=True)
        return loss


def collectives(epochs: int, steps: int, window: int, names: int) -> Counter[str]:
    """Return how often each collective of gloo ran in a fit on this rank, and how often sums of numbers and of tensors
    in shared memory."""
    trainer = silent_trainer(devices=2, max_epochs=epochs, accumulate_grad_batches=window)
    batches = loader(2 * 2 * window * steps, 2)
    shared: Counter[str] = Counter()
    post, add = Board.post, TensorSums.add

    def counted(board: Board, numbers: Sequence[float]) -> Posted:
        shared["numbers"] += 1
        return post(board, numbers)

    def counted_tensor(sums: TensorSums, tensor: Tensor, factor: float = 1.0) -> None:
        shared["tensors"] += 1
        add(sums, tensor, factor)

    with profile(activities=[ProfilerActivity.CPU]) as seen, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Board, "post", counted)
        patch.setattr(TensorSums, "add", counted_tensor)
        trainer.fit(Chatty(names), batches)
    assert trainer.global_step == epochs * steps
    found = Counter(event.name for event in seen.events() if event.name.startswith("gloo:"))
    return found + shared


def per_step(window: int, names: int) -> dict[str, float]:
    """Return the collectives of one optimizer step: the difference between a long epoch and a short one."""
    long, short = collectives(1, 11, window, names), collectives(1, 3, window, names)
    return {name: (long[name] - short[name]) / 8 for name in long if long[name] != short[name]}


def per_epoch(names: int) -> dict[str, float]:
    """Return the collectives of an epoch's end: those of an epoch, less those of its steps."""
    more, fewer = collectives(5, 2, 1, names), collectives(1, 2, 1, names)
    step = per_step(1, names)
    return {name: (more[name] - fewer[name]) / 4 - 2 * step.get(name, 0) for name in more}


@pytest.mark.parametrize(("window", "names"), [(1, 0), (4, 50)])
def test_a_step_takes_one_gradient_reduction_and_two_messages_in_shared_memory(window: int, names: int) -> None:
    for found in run_on_ranks(2, per_step, window, names):
        assert found == {"tensors": 1.0, "numbers": 2.0}


def test_an_epoch_ends_with_one_exchange_of_metrics_and_one_of_triggers() -> None:
    for found in run_on_ranks(2, per_epoch, 50):
        assert {name: count for name, count in found.items() if count} == {
            "gloo:all_gather": 1.0,
            "numbers": 1.0,
        }
