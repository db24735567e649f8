"""Saves from devices: how often the host waits, whatever the number of tensors, and what is saved."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_recording import Recording, recorded
from emulated_fits import Classifier, batches, emulated_trainer
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx.callbacks import Callback, OnExceptionCheckpoint
from phalanx.checkpoint import open_checkpoint
from phalanx.framework.checkpoint import host_memory
from phalanx.framework.checkpoint.host_memory import HostPieces


class Deep(Classifier):
    """The classifier with any number of further layers, which change nothing, and values that are logged."""

    def __init__(self, layers: int, logged: int, **options: Any) -> None:
        super().__init__(**options)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(4)
            self.further = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
        self.logged = logged

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return a loss that all layers contribute to."""
        loss = super().training_step(batch, batch_idx) + self.further(batch[0]).square().mean()
        for number in range(self.logged):
            self.log(f"value_{number}", loss * number, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return an Adam with one step counter on the device for each parameter."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


class SaveOnce(Callback):
    """Saves the third step at once; counts what makes the host wait meanwhile."""

    def __init__(self, path: Path, recording: Recording) -> None:
        self.path, self.recording = path, recording
        self.waits: list[str] = []
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save after the third batch."""
        if batch_idx == 2:
            self.recording.clear()
            trainer.save_checkpoint(self.path)
            self.waits = [str(entry) for entry in self.recording.entries]
            self.weights = {name: value.cpu() for name, value in module.state_dict().items()}


def waits_of_saves(strategy: str, devices: int, root: str) -> list[list[str]]:
    """Return what the host waited for in saves of few and of many tensors, after checking their contents."""
    found = []
    for layers, logged in ((2, 1), (20, 12)):
        path = Path(root) / f"{layers}.ckpt"
        with recorded("sync", "event", "pageable", "race") as recording:
            callback = SaveOnce(path, recording)
            trainer = emulated_trainer(devices, strategy=strategy, max_steps=4, callbacks=[callback])
            trainer.fit(Deep(layers, logged), batches(4 * devices, pins=True))
        assert not recording.of("race")
        if strategy != "fsdp":
            assert_equal(open_checkpoint(path).read_section("model"), callback.weights)
        found.append(callback.waits)
    return found


def assert_equal(saved: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(saved, expected, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_save_waits_as_often_for_many_tensors_as_for_few(strategy: str, tmp_path: Path) -> None:
    devices = 1 if strategy == "single" else 2
    for few, many in run_on_ranks(devices, waits_of_saves, strategy, devices, str(tmp_path), device="cuda"):
        assert len(few) == len(many) <= 6, "\n".join(many)
        assert not any(wait.startswith("pageable") for wait in many)


def pieces_of(capacity: int) -> tuple[list[str], int]:
    """Copy tensors of many kinds through buffers of a few bytes; return races, and the number of waits."""
    tensors: dict[str, Tensor] = {
        "host": torch.arange(7.0),
        "long": torch.randn(100),
        "strided": torch.randn(6, 8).t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.0),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "double": torch.randn(3, dtype=torch.float64),
        "negative": torch.view_as_complex(torch.randn(4, 2)).conj().imag,
    }
    on_device = {name: value if name == "host" else value.cuda() for name, value in tensors.items()}
    copies = HostPieces(0)
    copies._capacity = capacity
    with recorded("sync", "event", "race") as recording:
        for _ in range(2):
            found: dict[str, list[Tensor]] = {}
            for name, piece in copies((name, on_device[name]) for name in (*tensors, "host")):
                found.setdefault(name, []).append(piece.clone())
    found["host"] = found["host"][:1]
    for name, value in tensors.items():
        assert torch.equal(torch.cat(found[name]), value.reshape(-1)), name
    return [str(entry) for entry in recording.of("race")], len(recording.of("sync", "event")) // 2


def test_tensors_pass_through_small_buffers_unchanged() -> None:
    for capacity, waits in ((64, 14), (320, 3), (host_memory.BUFFER_BYTES >> 10, 1)):
        assert run_on_ranks(1, pieces_of, capacity, device="cuda") == [([], waits)]


def waits_of_recorded_steps(callbacks: Callable[[str], list[Any]]) -> list[str]:
    with tempfile.TemporaryDirectory() as root, recorded("sync", "event", "pageable") as recording:
        waits: list[str] = []

        def note(module: Classifier, index: int) -> None:
            # Of the steps 3 to 6: the first ones allocate state.
            if index == 3:
                recording.clear()
            elif index == 7:
                waits.extend(map(str, recording.entries))

        trainer = emulated_trainer(1, max_steps=8, log_every_n_steps=100, callbacks=callbacks(root))
        trainer.fit(Deep(1, 2, at_step=note), batches(8, pins=True))
        return waits


def on_exception(root: str) -> list[Any]:
    return [OnExceptionCheckpoint(root)]


def no_callback(root: str) -> list[Any]:
    return []


def test_a_step_that_is_recorded_for_an_error_reads_no_device() -> None:
    for callbacks in (no_callback, on_exception):
        assert run_on_ranks(1, waits_of_recorded_steps, callbacks, device="cuda") == [[]]
