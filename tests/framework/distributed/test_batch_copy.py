"""Batches on their way to a GPU. The meta device stands in for it, and objects that record calls for its streams.

See also emulated_cuda/test_batch_uploads.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import Regressor
from torch import Tensor
from torch.utils.data import DataLoader

from phalanx.framework.core.precision import resolve_precision
from phalanx.framework.data.dataloader import private_copy
from phalanx.framework.distributed.batch_copy import BatchCopy
from phalanx.framework.run.overrides import batch_transfer

META = torch.device("meta")


class Streams:
    """The streams of a device, and the order of calls."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.current = "compute"
        patch.setattr(torch.cuda, "Stream", lambda device: "copies")
        patch.setattr(torch.cuda, "stream", self._entered)
        patch.setattr(torch.cuda, "current_stream", lambda device: self)
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: self.calls.append("record"))
        real = Tensor.to

        def to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
            self.calls.append(f"copy on {self.current}")
            return real(tensor, META, **options)

        patch.setattr(Tensor, "to", to)

    @contextmanager
    def _entered(self, stream: str) -> Iterator[None]:
        self.current = stream
        yield
        self.current = "compute"

    def wait_stream(self, stream: str) -> None:
        self.calls.append(f"wait for {stream}")


def test_tensors_that_belong_to_one_stream_are_copied_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse, there = torch.eye(2).to_sparse(), torch.empty(2, device="meta")
    streams = Streams(monkeypatch)
    copied = BatchCopy(META)({"parts": (sparse, there, torch.ones(3), 4), "names": ["a"]})
    assert streams.calls == ["copy on compute"] * 2 + ["copy on copies", "record", "wait for copies"]
    assert (copied["names"], copied["parts"][3]) == (["a"], 4)


def test_a_hook_that_moves_batches_does_so_alone() -> None:
    class Moving(Regressor):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return "moved"

    transfer = batch_transfer(torch.device("cuda", 0), resolve_precision("32-true"), Moving(), None)
    assert transfer is not None
    assert transfer(torch.ones(2), 0) == "moved"


@pytest.mark.parametrize(("on_cuda", "variable", "pinned"), [(True, "", True), (True, "0", False), (False, "", False)])
def test_batches_for_a_gpu_are_in_pinned_memory(
    on_cuda: bool, variable: str, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_cuda)
    if variable:
        monkeypatch.setenv("PHALANX_PIN_MEMORY", variable)
    given: DataLoader[int] = DataLoader([1, 2])  # type: ignore[arg-type]
    assert private_copy(given, None, "loader").pin_memory is pinned
    assert given.pin_memory is False
