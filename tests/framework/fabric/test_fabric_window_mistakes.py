"""Ordinary mistakes with ``forward_backward``, each refused in a sentence, and what is not one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from messages import refuses
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import Fabric
from phalanx.errors import ConfigurationError, LoopError

ROWS = torch.linspace(-1, 1, 24).view(6, 4)


def prepared(fabric: Fabric) -> tuple[Any, Any, Callable[[Tensor], Tensor]]:
    torch.manual_seed(2)
    module = nn.Linear(4, 1)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    return model, optimizer, lambda batch: model(batch).square().mean()


def alone() -> tuple[Fabric, Any, Any, Callable[[Tensor], Tensor]]:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    return fabric, *prepared(fabric)


@pytest.mark.parametrize("second", ["empty", "weightless"])
def test_a_window_without_weight_keeps_gradients_that_exist(second: str) -> None:
    fabric, model, optimizer, step = alone()
    expected = model.weight.detach() - 0.1 * torch.autograd.grad(step(ROWS), [model.weight])[0]
    fabric.forward_backward(step, [ROWS])
    fabric.forward_backward(step, [] if second == "empty" else [ROWS], [] if second == "empty" else [0.0])
    optimizer.step()
    assert not optimizer.step_was_skipped
    torch.testing.assert_close(model.weight.detach(), expected)
    optimizer.zero_grad()
    fabric.forward_backward(step, [])
    optimizer.step()
    assert optimizer.step_was_skipped


def test_a_window_whose_gradients_were_dropped_adds_nothing() -> None:
    fabric, _, optimizer, step = alone()
    fabric.forward_backward(step, [ROWS])
    optimizer.zero_grad()
    fabric.forward_backward(step, [])
    optimizer.step()
    assert optimizer.step_was_skipped


def test_gradients_of_accumulate_are_used_before_a_whole_window() -> None:
    fabric, model, optimizer, step = alone()
    with fabric.accumulate(model):
        fabric.backward(step(ROWS), weight=8)
    with refuses(ConfigurationError, "forward_backward", "optimizer.step"):
        fabric.forward_backward(step, [ROWS])
    optimizer.step()
    fabric.forward_backward(step, [ROWS])


MISTAKES: list[tuple[str, Any, type[Exception], str]] = [
    ("one batch", lambda f, m, o, s: f.forward_backward(s, ROWS), ConfigurationError, "Tensor"),
    ("swapped", lambda f, m, o, s: f.forward_backward([ROWS], s), ConfigurationError, "list as"),
    ("weights", lambda f, m, o, s: f.forward_backward(s, [ROWS], 6), ConfigurationError, "weights="),
    ("no weight", lambda f, m, o, s: f.forward_backward(s, [ROWS], [None]), ConfigurationError, "weights="),
    ("detached", lambda f, m, o, s: f.forward_backward(lambda b: s(b).detach(), [ROWS]), LoopError, "no_grad"),
    ("keys", lambda f, m, o, s: f.forward_backward(lambda b: {1: s(b), "x": 2}, [ROWS]), LoopError, "['1', 'x']"),
]


@pytest.mark.parametrize(("call", "kind", "name"), [each[1:] for each in MISTAKES], ids=[each[0] for each in MISTAKES])
def test_ordinary_mistakes_are_refused(call: Callable[..., Any], kind: type[Exception], name: str) -> None:
    with refuses(kind, name):
        call(*alone())


@pytest.mark.parametrize("verb", ["step", "zero_grad", "clip"])
def test_a_step_neither_updates_nor_clips(verb: str) -> None:
    fabric, model, optimizer, step = alone()

    def mistaken(batch: Tensor) -> Tensor:
        loss = step(batch)
        if verb == "clip":
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
        else:
            getattr(optimizer, verb)()
        return loss

    with refuses(ConfigurationError, "forward_backward"):
        fabric.forward_backward(mistaken, [ROWS, ROWS])


def several() -> str:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    _, _, step = prepared(fabric)
    prepared(fabric)
    with pytest.raises(ConfigurationError) as caught:
        fabric.forward_backward(step, [ROWS] if fabric.global_rank == 0 else [])
    fabric.free_memory()
    return str(caught.value)


def test_a_rank_without_data_needs_to_know_the_module() -> None:
    assert all("model=..." in message for message in run_on_ranks(2, several))


def clipped() -> float:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="zero2")
    fabric.launch()
    model, optimizer, step = prepared(fabric)
    fabric.forward_backward(step, [])
    norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
    assert norm is not None
    optimizer.step()
    fabric.forward_backward(step, [ROWS])
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    found = norm.item()
    fabric.free_memory()
    return found


def test_a_window_without_data_has_the_norm_zero() -> None:
    assert run_on_ranks(2, clipped) == [0.0, 0.0]
