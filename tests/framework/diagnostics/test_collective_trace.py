"""``debug="collectives"``: the first difference between the ranks' collectives is an error on all, and none hangs."""

from __future__ import annotations

import ctypes
import inspect
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from messages import refuses
from models import Regressor, loader, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor

from phalanx.framework.core.errors import ConfigurationError, DesyncError
from phalanx.framework.diagnostics.collective_trace import _thread_name

AT = 2


class Differing(Regressor):
    """Calls another collective on rank 1 than on rank 0, in one batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        mine = torch.ones(3)
        odd = self.global_rank == 1 and batch_idx == AT
        if self.how == "extra" and odd:
            dist.all_reduce(mine)
        elif self.how == "kind":
            if odd:
                dist.broadcast(mine, 0)
            else:
                dist.all_reduce(mine)
        elif self.how == "shape":
            dist.all_reduce(mine[:2] if odd else mine)
        elif self.how == "dtype":
            dist.all_reduce(mine.long() if odd else mine)
        elif self.how == "root":
            dist.broadcast(mine, 1 if odd else 0)
        elif self.how == "line":
            if odd:
                dist.all_reduce(mine)
            else:
                dist.all_reduce(mine)
        elif self.how == "gone" and odd:
            raise ValueError("planted")
        return loss


def line_of(text: str, nth: int = 0) -> int:
    lines, start = inspect.getsourcelines(Differing)
    return [start + number for number, line in enumerate(lines) if line.strip() == text][nth]


def differs(how: str, strategy: str) -> str:
    trainer = silent_trainer(devices=2, strategy=strategy, max_epochs=1, debug="collectives", preemption_signals=[])
    real, began = dist.all_reduce, time.monotonic()
    try:
        trainer.fit(Differing(how), loader(40, 4))
    except (DesyncError, ValueError) as error:
        message = f"{type(error).__name__} {error}"
    assert dist.all_reduce is real
    assert time.monotonic() - began < 60
    return message


CASES = {
    "extra": "kind): rank 0 is at a control reduction of 2 numbers ({}), rank 1 is at all_reduce of (3,",
    "kind": "(its kind): rank 0 is at all_reduce of (3,) float32, SUM",
    "shape": "(its shape, dtype or root): rank 0 is at all_reduce of (3,) float32, SUM ({}), rank 1 is at all_reduce",
    "dtype": "rank 1 is at all_reduce of (3,) int64, SUM",
    "root": "rank 0 is at broadcast of (3,) float32, 0 ({}), rank 1 is at broadcast of (3,) float32, 1",
    "line": "(its line): rank 0 is at all_reduce",
}


@pytest.mark.parametrize("how", CASES)
def test_the_first_difference_is_named_on_all_ranks(how: str) -> None:
    first, second = run_on_ranks(2, differs, how, "ddp")
    assert first == second
    assert f"ranks 0 and 1 differ at optimizer step {AT}" in first
    assert CASES[how].partition("{}")[0] in first
    assert CASES[how].rpartition("{}")[2] in first
    assert f"{__file__}:" in first
    if how == "line":
        assert f":{line_of('dist.all_reduce(mine)', 2)})" in first
        assert f":{line_of('dist.all_reduce(mine)', 3)})" in first


def test_a_rank_that_fails_is_named_by_those_that_wait() -> None:
    waiting, gone = run_on_ranks(2, differs, "gone", "ddp")
    assert gone == "ValueError planted"
    assert "rank 1 has left the fit with ValueError: planted" in waiting


def agrees(strategy: str, debug: str | None) -> Tensor:
    module = Differing("none")
    module.automatic_optimization = True
    trainer = silent_trainer(
        devices=2, strategy=strategy, max_epochs=2, debug=debug, accumulate_grad_batches=2, num_sanity_val_steps=1
    )
    # In the last window, rank 0 has two micro-batches and rank 1 has one.
    trainer.fit(module, loader(41, 4))
    return weights_of(module) if not next(module.parameters()).is_meta else torch.zeros(1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_the_trace_does_not_change_training(strategy: str) -> None:
    plain, watched = (run_on_ranks(2, agrees, strategy, debug) for debug in (None, "collectives"))
    for one, other in zip(plain, watched, strict=True):
        assert torch.equal(one, other)


def test_one_process_has_nothing_to_compare() -> None:
    silent_trainer(devices=1, max_epochs=1, debug="collectives").fit(Regressor(), loader(8))


def test_an_unknown_debug_mode_is_refused() -> None:
    with refuses(ConfigurationError, "'colectives'", "'collectives'"):
        silent_trainer(debug="colectives")


def test_threads_that_torch_starts_have_one_name_on_all_ranks() -> None:
    # Backward passes on CUDA run in such a thread, which Python numbers in the order of first use.
    names: list[str] = []
    library = ctypes.PyDLL(None)
    routine = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: names.append(_thread_name()))
    for _ in range(2):
        thread = ctypes.c_ulong()
        assert library.pthread_create(ctypes.byref(thread), None, routine, None) == 0
        ctypes.CDLL(None).pthread_join(thread, None)
    own = threading.Thread(target=lambda: names.append(_thread_name()), name="loader")
    own.start()
    own.join()
    assert names == ["backward", "backward", "loader"]
