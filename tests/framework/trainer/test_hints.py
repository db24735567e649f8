"""Hints: settings of torch that make a GPU faster, and what takes the memory of a fit that has none left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_fits import Tiny, loader, quiet_trainer
from torch import nn

from phalanx.framework.diagnostics.out_of_memory import is_out_of_memory
from phalanx.framework.trainer.hints import device_hints, largest_lines

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


# ---- a fit without memory left -------------------------------------------------------------------------------------


class Exhausting(Tiny):
    """Runs out of memory in the second step."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.large = nn.Linear(1000, 250)
        self.error = error

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise self.error
        return self.large(torch.ones(1, 1000)).square().mean() + self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
    ],
)
def test_the_error_names_what_takes_the_memory(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught:
        quiet_trainer(tmp_path, [], max_epochs=1).fit(Exhausting(error), loader())
    hint = getattr(caught.value, "__notes__", [""])[0]
    assert hint.splitlines() == [
        "Memory on rank 0: optimizer state 2.0 MB, parameters 1.0 MB, gradients 1.0 MB.",
        "Largest: large.weight 1.0 MB, gradient of large.weight 1.0 MB, exp_avg of large.weight 1.0 MB, "
        "exp_avg_sq of large.weight 1.0 MB, large.bias 1.0 KB.",
    ]


def test_other_errors_are_not_taken_for_it() -> None:
    assert not is_out_of_memory(RuntimeError("out of range"))
    assert not is_out_of_memory(ValueError("DefaultCPUAllocator: can't allocate memory"))


def block(size: int, *frames: tuple[str, int], state: str = "active_allocated") -> dict[str, Any]:
    listed = [{"filename": filename, "line": line, "name": "f"} for filename, line in frames]
    return {"size": size, "state": state, "frames": listed}


def test_the_lines_of_the_largest_tensors() -> None:
    inner = (str(Path(torch.__file__).parent / "nn" / "functional.py"), 12)
    blocks = [
        block(100, inner, ("/user/model.py", 7), ("/user/train.py", 3)),
        block(50, inner, ("/user/model.py", 7)),
        block(120, ("/user/model.py", 9)),
        block(10, inner),
        block(900, ("/user/model.py", 1), state="inactive"),
        block(800),
    ]
    assert largest_lines([{"blocks": blocks[:2]}, {"blocks": blocks[2:]}]) == [
        ("/user/model.py:7 (f)", 150),
        ("/user/model.py:9 (f)", 120),
        (f"{inner[0]}:12 (f)", 10),
    ]
    assert largest_lines([]) == []
