"""What setup gives back behaves as what it was given; callbacks, loggers and the small verbs."""

from __future__ import annotations

import copy
import pickle
from collections import UserList
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from ranks import run_on_ranks, run_script
from torch import Tensor, nn

from phalanx import Callback, Fabric, Trainer
from phalanx.framework.core.errors import ConfigurationError, UnknownNameError
from phalanx.loggers import CSVLogger


class Scorer(nn.Module):
    """A model with an attribute, a buffer, a method that is no forward, and one that is to be called as one."""

    seen: torch.dtype
    calls: int

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("offset", torch.zeros(2))
        self.register_buffer("rotations", torch.polar(torch.ones(2), torch.ones(2)))
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.seen = inputs.dtype
        output: Tensor = self.layer(inputs) + self.offset
        return output

    def twice(self) -> int:
        return 2 * self.calls

    def loss(self, inputs: Tensor) -> dict[str, Tensor]:
        self.seen = torch.get_default_dtype() if not torch.is_autocast_enabled("cpu") else torch.bfloat16
        return {"loss": self.layer(inputs).sum()}


def test_a_module_behaves_like_the_original() -> None:
    fabric = Fabric(accelerator="cpu")
    original = Scorer()
    model = fabric.setup_module(original)
    assert isinstance(model, Scorer)
    assert list(model.state_dict()) == ["offset", "rotations", "layer.weight", "layer.bias"]
    assert [name for name, _ in model.named_parameters()] == ["layer.weight", "layer.bias"]
    assert next(model.parameters()) is next(original.parameters())
    model(torch.ones(1, 2))
    assert (model.calls, original.calls, model.twice()) == (1, 1, 2)
    model.calls = 5
    assert original.calls == 5
    model.eval()
    assert not original.training
    assert not original.layer.training
    hooked = []
    handle = model.register_forward_hook(lambda module, inputs, output: hooked.append(type(module)))
    model(torch.ones(1, 2))
    handle.remove()
    assert hooked == [Scorer]
    assert fabric.unwrap_model(model) is original
    assert fabric.unwrap_model(nn.Sequential(nn.ReLU()))[0].__class__ is nn.ReLU
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is Scorer
        assert torch.equal(twin.layer.weight, original.layer.weight)
        assert twin.layer.weight is not original.layer.weight
    assert "FabricScorer" in repr(model)
    # It can be read where phalanx is not installed.
    assert b"phalanx" not in pickle.dumps(fabric.setup_module(nn.Linear(2, 1)))


@pytest.mark.parametrize(
    ("precision", "stored", "seen"),
    [
        ("bf16-mixed", torch.float32, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
        ("64-true", torch.float64, torch.float64),
    ],
)
def test_a_module_runs_in_the_precision(precision: str, stored: torch.dtype, seen: torch.dtype) -> None:
    fabric = Fabric(accelerator="cpu", precision=precision)
    model = fabric.setup_module(Scorer())
    output = model(torch.ones(1, 2))
    assert model.layer.weight.dtype is model.offset.dtype is stored
    torch.testing.assert_close(model.rotations, Scorer().rotations, rtol=0, atol=0, check_dtype=False)
    assert model.rotations.dtype is (torch.complex128 if stored is torch.float64 else torch.complex64)
    assert model.seen is seen
    assert output.dtype is (torch.float64 if stored is torch.float64 else torch.float32)
    assert torch.get_default_dtype() is torch.float32
    with fabric.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is (
            torch.bfloat16 if precision == "bf16-mixed" else torch.get_default_dtype()
        )


def test_a_marked_method_is_called_as_forward_is() -> None:
    fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
    model = fabric.setup_module(Scorer())
    other = fabric.setup_module(Scorer())
    model.loss(torch.ones(1, 2))
    assert model.seen is torch.float32
    model.mark_forward_method("loss")  # type: ignore[operator]
    assert model.loss(torch.ones(1, 2))["loss"].dtype is torch.float32
    assert model.seen is torch.bfloat16
    other.loss(torch.ones(1, 2))
    assert other.seen is torch.float32
    with refuses(ConfigurationError, "'losss'", "mark_forward_method"):
        model.mark_forward_method("losss")  # type: ignore[operator]


def marked_over_ranks() -> list[float]:
    fabric = Fabric(accelerator="cpu")
    torch.manual_seed(fabric.global_rank)
    original = Scorer()
    model, optimizer = fabric.setup(original, torch.optim.SGD(original.parameters(), lr=1.0))
    model.mark_forward_method(model.loss)
    model.eval()
    with torch.no_grad():
        # Ranks may evaluate different numbers of batches.
        for _ in range(1 + fabric.global_rank):
            model(torch.ones(1, 2))
    model.train()
    fabric.backward(model.loss(torch.full((1, 2), float(fabric.global_rank)))["loss"])
    optimizer.step()
    assert original.layer.weight.grad is not None
    return [original.layer.weight.grad[0, 0].item(), original.layer.weight.sum().item()]


def test_gradients_of_a_marked_method_are_averaged_and_weights_start_identical() -> None:
    first, second = run_on_ranks(2, marked_over_ranks)
    assert first == second
    assert first[0] == 0.5


def test_a_compiled_module_keeps_its_names() -> None:
    fabric = Fabric(accelerator="cpu")
    original = nn.Linear(2, 1)
    compiled: Any = torch.compile(original, backend="eager")
    model: Any = fabric.setup_module(compiled)
    assert list(model.state_dict()) == ["weight", "bias"]
    assert model(torch.ones(1, 2)).shape == (1, 1)
    assert fabric.unwrap_model(model) is original


def test_an_optimizer_is_of_its_class_and_schedulers_accept_it() -> None:
    fabric = Fabric(accelerator="cpu")
    original = nn.Linear(1, 1)
    plain = torch.optim.AdamW(original.parameters(), lr=0.5)
    _, optimizer = fabric.setup(original, plain)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is plain.param_groups
    for kind in (torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.LinearLR):
        kind(optimizer, 1)
    plateau = fabric.setup_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
    assert isinstance(plateau, torch.optim.lr_scheduler.ReduceLROnPlateau)
    result = optimizer.step(lambda: "what the closure returns")
    assert result == "what the closure returns"
    plateau.step(1.0)
    optimizer.step()
    plateau.step(2.0)
    assert optimizer.param_groups[0]["lr"] < 0.5


def test_modules_and_optimizers_can_be_set_up_one_after_the_other() -> None:
    fabric = Fabric(accelerator="cpu")
    model = fabric.setup_module(nn.Linear(1, 1, bias=False))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=1.0))
    fabric.backward(model(torch.ones(1, 1)).sum(), model=model)
    before = model.weight.item()
    optimizer.step()
    assert model.weight.item() == pytest.approx(before - 1.0)


def test_what_cannot_be_set_up_is_refused() -> None:
    fabric = Fabric(accelerator="cpu")
    original = nn.Linear(1, 1)
    model, optimizer = fabric.setup(original, torch.optim.SGD(original.parameters(), lr=1.0))
    stray = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    for again in (original, model):
        with refuses(ConfigurationError, "Linear"):
            fabric.setup(again)
    with refuses(ConfigurationError, "FabricOptimizer"):
        fabric.setup_optimizers(optimizer)
    with refuses(ConfigurationError, "setup_optimizers", "SGD"):
        fabric.setup_optimizers(stray)
    with refuses(ConfigurationError, "setup_scheduler", "StepLR"):
        fabric.setup_scheduler(torch.optim.lr_scheduler.StepLR(stray, 1))
    with (
        refuses(ConfigurationError, "no_backward_sync"),
        fabric.no_backward_sync(nn.Linear(1, 1)),
    ):
        pass
    with refuses(ConfigurationError, "clip_gradients"):
        fabric.clip_gradients(model, stray, max_norm=1.0)
    with refuses(ConfigurationError, "SGD"):
        fabric.setup(stray)  # type: ignore[arg-type]


def test_modules_are_built_in_place() -> None:
    fabric = Fabric(accelerator="cpu", precision="bf16-true")
    with fabric.init_module():
        assert nn.Linear(2, 2).weight.dtype is torch.bfloat16
    with fabric.init_module(empty_init=True):
        norm = nn.LayerNorm(2)
        nn.init.constant_(norm.weight, 7.0)
    assert 7.0 not in norm.weight.tolist()
    assert torch.get_default_dtype() is torch.float32


def test_memory_is_released() -> None:
    fabric = Fabric(accelerator="cpu")
    original = nn.Linear(1, 1)
    model, optimizer = fabric.setup(original, torch.optim.SGD(original.parameters(), lr=1.0))
    model, optimizer = fabric.free_memory(model, optimizer)
    assert (model, optimizer) == (None, None)
    fabric.setup(original)


class Recorder:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_train_epoch_end(self, epoch: int, loss: float = 0.0) -> None:
        self.calls.append((epoch, loss))


def test_hooks_are_called_by_name_with_what_they_take() -> None:
    recorder = Recorder()
    fabric = Fabric(accelerator="cpu", callbacks=[object(), recorder])
    fabric.call("on_train_epoch_end", 3, loss=0.5, model="not taken")
    fabric.call("on_anything_else")
    assert recorder.calls == [(3, 0.5)]


LOGGED = """
import sys
from phalanx import Callback, Fabric, Trainer
from phalanx.loggers import CSVLogger

end, ranks, root = sys.argv[1:]
fabric = Fabric(accelerator="cpu", devices=int(ranks), loggers=CSVLogger(root, name="run", version=0))
fabric.launch()
for step in range(5):
    fabric.log("loss", 0.5, step)
fabric.barrier()
if end == "error" and fabric.is_global_zero:
    raise RuntimeError("stop")
if end == "exit":
    sys.exit(3)
"""


@pytest.mark.parametrize(("end", "code"), [("return", 0), ("exit", 3), ("error", 1)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_metrics_are_on_disk_when_the_process_has_ended(tmp_path: Path, end: str, code: int, ranks: int) -> None:
    done = run_script(LOGGED, end, str(ranks), str(tmp_path))
    assert done.returncode == code, done.stdout
    assert len((tmp_path / "run" / "version_0" / "metrics.csv").read_text().splitlines()) == 6


def test_loggers_in_any_sequence(tmp_path: Path) -> None:
    given = UserList([CSVLogger(tmp_path), "csv"])
    assert len(Fabric(accelerator="cpu", loggers=given).loggers) == 2
    assert len(Trainer(accelerator="cpu", devices=1, logger=given, default_root_dir=tmp_path).loggers) == 2
    callback = Callback()
    assert callback in Trainer(accelerator="cpu", devices=1, callbacks=UserList([callback])).callbacks


def test_metrics_are_sent_to_the_loggers(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", loggers=CSVLogger(tmp_path, name="run", version=0))
    fabric.log("loss", torch.tensor(0.5), step=2)
    fabric.log_dict({"loss": 0.25, "accuracy": 1.0}, step=3)
    fabric.end_training()
    lines = (tmp_path / "run" / "version_0" / "metrics.csv").read_text().splitlines()
    assert len(lines) == 3
    assert "0.5" in lines[1]
    assert fabric.logger is fabric.loggers[0]
    with refuses(UnknownNameError, "'cvs'", "'csv'"):
        Fabric(accelerator="cpu", loggers="cvs")
    with refuses(ConfigurationError, "Fabric", "loggers="):
        _ = Fabric(accelerator="cpu").logger


def test_a_block_is_profiled(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu")
    with fabric.profile(tmp_path / "traces") as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert any("mm" in event.key for event in profiler.key_averages())
    assert (tmp_path / "traces" / "rank_0.json").stat().st_size > 0
