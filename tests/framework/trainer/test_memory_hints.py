"""A fit without memory left: its error names what takes the memory, and the lines of the largest tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_fits import Tiny, loader, quiet_trainer
from torch import nn

from phalanx.framework.diagnostics.out_of_memory import is_out_of_memory
from phalanx.framework.trainer.hints import largest_lines


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
