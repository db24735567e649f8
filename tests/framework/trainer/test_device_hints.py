"""Advice about settings of torch on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.framework.trainer.hints import device_hints

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    yield
    torch.set_float32_matmul_precision("highest")


def optimizer(kind: str = "AdamW", **options: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, kind)([nn.Parameter(torch.zeros(1))], lr=0.1, **options)
    return made


def test_tf32_is_named_where_it_would_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    (hint,) = device_hints(CUDA, True, [])
    assert "torch.set_float32_matmul_precision('high')" in hint
    assert not list(device_hints(CUDA, False, []))
    torch.set_float32_matmul_precision("high")
    assert not list(device_hints(CUDA, True, []))
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert not list(device_hints(CUDA, True, []))


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("AdamW", {}, "AdamW(fused=True)"),
        ("SGD", {}, "SGD(fused=True)"),
        ("Adam", {"fused": True}, None),
        ("Adam", {"fused": False}, None),
        ("Adam", {"foreach": True}, None),
        ("Rprop", {}, None),
    ],
)
def test_a_fused_optimizer_is_named_unless_the_user_chose(
    kind: str, options: dict[str, Any], named: str | None
) -> None:
    hints = list(device_hints(CUDA, False, [optimizer(kind, **options)]))
    assert [named in hint for hint in hints] == [True] if named is not None else hints == []


def test_an_eps_that_is_zero_in_float16_is_named() -> None:
    weights = [nn.Parameter(torch.zeros(1, dtype=torch.float16))]
    cpu = torch.device("cpu")
    (hint,) = device_hints(cpu, False, [torch.optim.AdamW(weights)])
    assert "AdamW(eps=1e-08)" in hint
    assert "bf16-true" in hint
    assert not list(device_hints(cpu, False, [torch.optim.AdamW(weights, eps=1e-4), torch.optim.SGD(weights)]))


def test_a_cpu_has_no_hints() -> None:
    assert not list(device_hints(torch.device("cpu"), True, [optimizer()]))
