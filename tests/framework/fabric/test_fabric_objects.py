"""What setup gives back behaves as what it was given; callbacks, loggers and the small verbs."""

from __future__ import annotations

import copy
import csv
import pickle
import re
import threading
from collections import UserList
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from ranks import run_on_ranks, run_script
from torch import Tensor, nn

import phalanx
from phalanx import Callback, Fabric, Trainer
from phalanx.framework.core.errors import ConfigurationError, UnknownNameError
from phalanx.framework.fabric.fabric import ABSENT
from phalanx.loggers import CSVLogger, Logger


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
    ("precision", "stored"),
    [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16), ("64-true", torch.float64)],
)
def test_a_module_runs_in_the_precision(precision: str, stored: torch.dtype) -> None:
    fabric = Fabric(accelerator="cpu", precision=precision)
    model = fabric.setup_module(Scorer())
    output = model(torch.ones(1, 2))
    assert model.layer.weight.dtype is model.offset.dtype is stored
    torch.testing.assert_close(model.rotations, Scorer().rotations, rtol=0, atol=0, check_dtype=False)
    assert model.rotations.dtype is (torch.complex128 if stored is torch.float64 else torch.complex64)
    assert model.seen is stored
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
    assert fabric.free_memory(model, optimizer) == [None, None]
    fabric.setup(original)


def test_modules_are_built_in_place() -> None:
    fabric = Fabric(accelerator="cpu", precision="bf16-true")
    with fabric.init_module():
        assert nn.Linear(2, 2).weight.dtype is torch.bfloat16
    with fabric.init_module(empty_init=True):
        norm = nn.LayerNorm(2)
        nn.init.constant_(norm.weight, 7.0)
    assert 7.0 not in norm.weight.tolist()
    assert torch.get_default_dtype() is torch.float32


def test_hooks_are_called_by_name_with_what_they_take() -> None:
    calls = []

    class Recorder:
        def on_train_epoch_end(self, epoch: int, loss: float = 0.0) -> None:
            calls.append((epoch, loss))

    fabric = Fabric(accelerator="cpu", callbacks=[object(), Recorder()])
    fabric.call("on_train_epoch_end", 3, loss=0.5, model="not taken")
    fabric.call("on_anything_else")
    assert calls == [(3, 0.5)]


# ---- loggers ---------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(("end", "code", "ranks"), [("return", 0, 2), ("exit", 3, 1), ("error", 1, 2)])
def test_metrics_are_on_disk_when_the_process_has_ended(end: str, code: int, ranks: int, tmp_path: Path) -> None:
    done = run_script(LOGGED, end, str(ranks), str(tmp_path))
    assert done.returncode == code, done.stdout
    assert len((tmp_path / "run" / "version_0" / "metrics.csv").read_text().splitlines()) == 6


class Failing(Logger):
    """Cannot write."""

    name, version = "failing", ""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        raise OSError("disk full")

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        pass


class Hanging(Failing):
    """Does not return from a call until it is released."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.released = threading.Event()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.entered.set()
        self.released.wait(30)


def test_a_logger_that_fails_does_not_stop_the_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fabric = Fabric(accelerator="cpu", loggers=[Failing(), CSVLogger(tmp_path, name="run", version=0)])
    fabric.log("loss", torch.tensor(0.5), step=2)
    fabric.log_dict({"loss": 0.25, "accuracy": 1.0}, step=3)
    fabric.end_training()
    with (tmp_path / "run" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == [(2, 0.5), (3, 0.25)]
    assert float(rows[1]["accuracy"]) == 1.0
    assert "Failing.log_metrics failed (OSError: disk full)" in capsys.readouterr().err


def test_a_logger_that_hangs_does_not_stop_the_loop() -> None:
    hanging = Hanging()
    fabric = Fabric(accelerator="cpu", loggers=hanging)
    fabric.log("loss", 0.5, 0)
    assert hanging.entered.wait(10)
    fabric.log("loss", 0.5, 1)
    hanging.released.set()
    fabric.end_training()


def test_a_logger_that_is_added_later_gets_what_follows(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", loggers=CSVLogger(tmp_path, name="first", version=0))
    fabric.log("loss", 0.5, 0)
    fabric.loggers.append(CSVLogger(tmp_path, name="second", version=0))
    fabric.log("loss", 0.25, 1)
    fabric.end_training()
    lines = [
        len((tmp_path / name / "version_0" / "metrics.csv").read_text().splitlines()) for name in ("first", "second")
    ]
    assert lines == [3, 2]


def test_loggers_in_any_sequence(tmp_path: Path) -> None:
    given = UserList([CSVLogger(tmp_path), "csv"])
    assert len(Fabric(accelerator="cpu", loggers=given).loggers) == 2
    assert len(Trainer(accelerator="cpu", devices=1, logger=given, default_root_dir=tmp_path).loggers) == 2
    callback = Callback()
    assert callback in Trainer(accelerator="cpu", devices=1, callbacks=UserList([callback])).callbacks


def test_loggers_of_a_fabric() -> None:
    fabric = Fabric(accelerator="cpu", loggers="csv")
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


# ---- the names -------------------------------------------------------------------------------------------------------

PAGE = Path(phalanx.__file__).parent / "docs" / "fabric.md"
# Attributes that the Trainer uses, and use_strategy, which replaces the strategy before a fit.
INTERNAL = {
    *("accumulation", "forward_context", "resources", "scaler", "strategy_scales_losses", "updater", "use_strategy"),
    *("compilation", "callbacks", "loggers", "precision", "strategy", "world"),
}


def test_every_public_name_is_documented_and_every_documented_name_exists() -> None:
    tables = PAGE.read_text().partition("## All methods")[2]
    documented = re.findall(r"`(\w+)`", "\n".join(line for line in tables.splitlines() if line.startswith("|")))
    public = {name for name in dir(Fabric(accelerator="cpu", devices=1)) if not name.startswith("_")} - ABSENT.keys()
    assert public - INTERNAL == set(documented)


def test_a_verb_can_be_overridden_and_called_through_super() -> None:
    class Doubling(Fabric):
        def all_reduce(self, data: Any, op: str = "mean", *, reduce_op: str | None = None, group: None = None) -> Any:
            return 2 * super().all_reduce(data, op, reduce_op=reduce_op)

    assert Doubling(accelerator="cpu", devices=1).all_reduce(3, "sum").item() == 6
