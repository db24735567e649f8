"""Checkpoints saved after an error: the state after the last optimizer step, from which a fit resumes exactly."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses, says
from ranks import run_on_ranks, run_script
from small_fits import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Trainer, TrainModule
from phalanx.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from phalanx.framework.core.errors import ConfigurationError


class Net(TrainModule):
    """State of all kinds: running statistics, dropout, a scheduler by step, momentum and epoch means."""

    def __init__(self, fails: str = "", at_step: int = 0, on_rank: int | None = None, dropout: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 1))
        self.fails, self.at_step, self.on_rank = fails, at_step, on_rank
        self.means: list[float] = []

    def _fail(self, where: str) -> None:
        if where == self.fails and self.global_step == self.at_step and self.on_rank in (None, self.global_rank):
            self.fails = ""
            raise RuntimeError(f"planted in {where}")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        self._fail("training_step")
        return loss

    def on_before_backward(self, loss: Any) -> None:
        self._fail("on_before_backward")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean() + torch.rand(()))
        self._fail("validation_step")

    def on_train_epoch_end(self) -> None:
        self._fail("on_train_epoch_end")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self._fail("optimizer_step")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def shuffled() -> DataLoader[Any]:
    rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)


def fit(folder: Path, module: Net, callback: Any, ckpt_path: Any = None, **settings: Any) -> Trainer:
    torch.manual_seed(5)
    trainer = quiet_trainer(folder, callback, max_epochs=2, val_check_interval=0.5, **settings)
    trainer.fit(module, shuffled(), shuffled(), ckpt_path=ckpt_path)
    return trainer


def result(module: Net, trainer: Trainer) -> tuple[Any, Any]:
    return module.state_dict(), {name: value.clone() for name, value in trainer.callback_metrics.items()}


# With windows of two batches, a validation comes in the middle of one.
@pytest.mark.parametrize(
    ("where", "at_step", "window"),
    [("training_step", 4, 1), ("on_before_backward", 2, 2), ("validation_step", 2, 2), ("on_train_epoch_end", 6, 1)],
)
def test_a_fit_resumed_after_an_error_equals_an_undisturbed_one(
    where: str, at_step: int, window: int, tmp_path: Path
) -> None:
    settings = {"accumulate_grad_batches": window}
    undisturbed = Net()
    expected = result(undisturbed, fit(tmp_path, undisturbed, OnExceptionCheckpoint(tmp_path / "none"), **settings))
    with pytest.raises(RuntimeError, match=f"planted in {where}"):
        fit(tmp_path, Net(where, at_step), OnExceptionCheckpoint(tmp_path / "saved", "error"), **settings)
    assert not (tmp_path / "none").exists()
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["error.ckpt"]
    resumed = Net()
    again = fit(
        tmp_path, resumed, OnExceptionCheckpoint(tmp_path / "none"), tmp_path / "saved" / "error.ckpt", **settings
    )
    torch.testing.assert_close(result(resumed, again), expected, rtol=0, atol=0)


class Changing(Net):
    """Changes a hyperparameter and a buffer, and draws numbers, in a hook that a resumed fit repeats."""

    total: Tensor

    def __init__(self, fails: str = "", at_step: int = 0) -> None:
        super().__init__(fails, at_step)
        self.register_buffer("total", torch.zeros(2))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().param_groups[0]["momentum"] *= 0.9
        self.total += random.random()
        self.log("drawn", random.random(), on_step=False, on_epoch=True)


def test_changes_between_the_step_and_the_error_are_not_saved(tmp_path: Path) -> None:
    undisturbed = Changing()
    random.seed(7)
    expected = result(undisturbed, fit(tmp_path, undisturbed, OnExceptionCheckpoint(tmp_path / "none")))
    random.seed(7)
    with pytest.raises(RuntimeError, match="planted in training_step"):
        fit(tmp_path, Changing("training_step", 4), OnExceptionCheckpoint(tmp_path / "saved"))
    resumed = Changing()
    again = fit(tmp_path, resumed, OnExceptionCheckpoint(tmp_path / "none"), tmp_path / "saved" / "on_exception.ckpt")
    torch.testing.assert_close(result(resumed, again), expected, rtol=0, atol=0)


def test_a_hyperparameter_that_cannot_be_saved_is_refused_before_training(tmp_path: Path) -> None:
    class Unsaveable(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([{"params": list(self.parameters()), "rule": print}], lr=0.1)

    began: list[int] = []
    with refuses(ConfigurationError, "'rule'"):
        fit(
            tmp_path,
            Unsaveable(),
            [OnExceptionCheckpoint(tmp_path), LambdaCallback(on_train_epoch_start=_noting(began))],
        )
    assert began == []


@pytest.mark.parametrize(
    ("at_step", "sentence"),
    [(0, "came before the first optimizer step"), (2, "came while optimizer step 2 was applied")],
)
def test_an_error_within_an_update_is_reported_and_saves_nothing(
    at_step: int, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="planted"):
        fit(tmp_path, Net("optimizer_step", at_step), OnExceptionCheckpoint(tmp_path / "saved"))
    assert f"Nothing was saved after the error: it {sentence}" in capsys.readouterr().out
    assert not (tmp_path / "saved").exists()


def test_model_checkpoint_saves_on_exception(tmp_path: Path) -> None:
    undisturbed = Net()
    expected = result(undisturbed, fit(tmp_path, undisturbed, OnExceptionCheckpoint(tmp_path / "none")))

    def checkpoint() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_on_exception=True, save_top_k=-1)

    with pytest.raises(RuntimeError, match="planted"):
        fit(tmp_path, Net("training_step", 3), checkpoint())
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names == {"epoch=0-step=2.ckpt", "on_exception.ckpt"}
    resumed = Net()
    again = fit(tmp_path, resumed, checkpoint(), tmp_path / "saved" / "on_exception.ckpt")
    torch.testing.assert_close(result(resumed, again), expected, rtol=0, atol=0)


def test_the_newest_checkpoint_is_found_in_the_directory_of_the_callback(tmp_path: Path) -> None:
    undisturbed = Net()
    expected = result(undisturbed, fit(tmp_path, undisturbed, OnExceptionCheckpoint(tmp_path / "none")))

    def savers() -> list[Any]:
        return [ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2), OnExceptionCheckpoint(tmp_path / "errors")]

    # Another run's checkpoint in the same directory has more progress.
    with pytest.raises(RuntimeError, match="planted"):
        fit(tmp_path / "other", Net("training_step", 5), savers(), ckpt_path=None)
    (tmp_path / "errors" / "on_exception.ckpt").rename(tmp_path / "errors" / "other.ckpt")
    with pytest.raises(RuntimeError, match="planted"):
        fit(tmp_path, Net("training_step", 3), savers())
    resumed = Net()
    began: list[int] = []
    again = fit(tmp_path, resumed, [*savers(), LambdaCallback(on_train_start=_noting(began))], "auto")
    assert began == [3]
    torch.testing.assert_close(result(resumed, again), expected, rtol=0, atol=0)


def _noting(began: list[int]) -> Any:
    return lambda trainer, module: began.append(trainer.global_step)


def test_last_is_newer_than_the_last_save_of_the_schedule_after_an_error(tmp_path: Path) -> None:
    """Given a Trainer whose fit ended with an error, when it fits again, then it resumes after the last step."""
    began: list[int] = []
    savers = [ModelCheckpoint(every_n_train_steps=2, save_last=True), OnExceptionCheckpoint(tmp_path / "errors")]
    trainer = quiet_trainer(tmp_path, [*savers, LambdaCallback(on_train_start=_noting(began))], max_epochs=1)
    with pytest.raises(RuntimeError, match="planted"):
        trainer.fit(Net("training_step", 3), shuffled())
    report = json.loads((trainer.run_dir / "report.json").read_text())
    assert report["last_checkpoint"] == str(tmp_path / "errors" / "on_exception.ckpt")
    trainer.fit(Net(), shuffled(), ckpt_path="last")
    assert began == [0, 3]


def test_a_preempted_run_is_saved_beside_its_other_checkpoints(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, [OnExceptionCheckpoint(tmp_path / "errors"), ModelCheckpoint(tmp_path / "saved")])
    assert trainer._session.preemption_directory() == tmp_path / "saved"


def test_an_empty_name_is_refused() -> None:
    with refuses(ConfigurationError, "OnExceptionCheckpoint", "filename=''"):
        OnExceptionCheckpoint("folder", "")


# ---- several ranks --------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from pathlib import Path

import torch
from test_on_exception_checkpoint import Net, shuffled

from phalanx import Trainer
from phalanx.callbacks import OnExceptionCheckpoint

folder, fails, rank, resume = sys.argv[1:]
torch.manual_seed(5)
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
                  callbacks=[OnExceptionCheckpoint(Path(folder) / "saved")])
module = Net(fails, 4, int(rank) if rank else None, dropout=0.0)
trainer.fit(module, shuffled(), ckpt_path=resume or None)
if trainer.is_global_zero:
    torch.save(module.state_dict(), Path(folder) / "weights.pt")
"""


def run(folder: Path, fails: str = "", rank: str = "", resume: str = "") -> Any:
    folder.mkdir(exist_ok=True)
    script = folder / "program.py"
    folders = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    script.write_text(f"import sys\nsys.path[:0] = {folders!r}\n{PROGRAM}")
    return run_script(script, str(folder), fails, rank, resume)


def weights_of_run(folder: Path, resume: str = "") -> dict[str, Tensor]:
    """Run to the end; return the weights without running statistics, of which checkpoints hold those of one rank."""
    done = run(folder, resume=resume)
    assert done.returncode == 0, done.stdout
    return {name: value for name, value in torch.load(folder / "weights.pt").items() if "running" not in name}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights of a run that does not fail."""
    return weights_of_run(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("rank", ["1", ""], ids=["one rank", "all ranks"])
def test_the_rank_that_fails_saves_for_all(rank: str, undisturbed: dict[str, Tensor], tmp_path: Path) -> None:
    failed = run(tmp_path / "failed", "training_step", rank)
    assert failed.returncode == 1, failed.stdout
    assert "planted in training_step" in failed.stdout
    assert "Nothing was saved" not in failed.stdout
    saved = tmp_path / "failed" / "saved"
    assert [path.name for path in saved.iterdir()] == ["on_exception.ckpt"]
    weights = weights_of_run(tmp_path / "resumed", str(saved / "on_exception.ckpt"))
    torch.testing.assert_close(weights, undisturbed, rtol=0, atol=0)


def fit_on_a_rank(folder: str, strategy: str) -> str:
    saver = OnExceptionCheckpoint(Path(folder) / "saved")
    trainer = quiet_trainer(Path(folder), saver, devices=2, strategy=strategy, max_epochs=1)
    with pytest.raises(ConfigurationError) as error:
        trainer.fit(Net(), shuffled())
    return str(error.value)


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_strategies_that_shard_the_state_are_refused(strategy: str, tmp_path: Path) -> None:
    says(run_on_ranks(2, fit_on_a_rank, str(tmp_path), strategy), "OnExceptionCheckpoint", f"strategy='{strategy}'")
