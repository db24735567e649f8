"""The temporary memory of updates on a device, against the count in a memory plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import run_on_ranks
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from phalanx.framework.memory.measure import update_bytes

SIZES = (100_000, 50_000)
ALL = 4 * sum(SIZES)
# What each takes, by hand: copies of the parameters, in bytes.
UPDATES: dict[str, tuple[Callable[[list[nn.Parameter]], Optimizer], int]] = {
    "adamw": (AdamW, ALL),
    "adamw amsgrad": (lambda ps: AdamW(ps, amsgrad=True), ALL),
    "adamw maximize": (lambda ps: AdamW(ps, maximize=True), ALL),
    "adamw fused": (lambda ps: AdamW(ps, fused=True), 0),
    "adamw loop": (lambda ps: AdamW(ps, foreach=False), 0),
    "adam decay": (lambda ps: Adam(ps, weight_decay=0.1), ALL),
    "two groups": (lambda ps: AdamW([{"params": [each]} for each in ps]), 4 * SIZES[0]),
    "sgd": (lambda ps: SGD(ps, lr=0.1, momentum=0.9, nesterov=True), 0),
    "sgd decay": (lambda ps: SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1), ALL),
    "rmsprop": (lambda ps: RMSprop(ps, momentum=0.9), ALL),
}


def peak_of_an_update(name: str) -> tuple[int, int]:
    """Return the bytes that a second update takes beyond what is held before it, and what a plan counts."""
    parameters = [nn.Parameter(torch.ones(size, device="cuda")) for size in SIZES]
    optimizer = UPDATES[name][0](parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
    return torch.cuda.max_memory_allocated() - before, update_bytes([optimizer], "cuda")


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_takes_what_a_plan_counts(name: str) -> None:
    ((taken, counted),) = run_on_ranks(1, peak_of_an_update, name, device="cuda")
    assert counted == UPDATES[name][1]
    if name != "adamw loop":
        # Step counters take some bytes. A loop takes the memory of one parameter.
        assert abs(taken - counted) < 1000
