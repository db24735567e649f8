"""``config.json`` and ``report.json``: how a run was started, and how it ended."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Regressor, loader, silent_trainer

import phalanx
from phalanx import Trainer
from phalanx.callbacks import EarlyStopping, ModelCheckpoint
from phalanx.framework.system.provenance import git_commit
from phalanx.loggers import CSVLogger


class Watched(Regressor):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1.5)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", 2.5)


def document(trainer: Trainer, name: str) -> dict[str, Any]:
    """Return a document in the directory of the last run."""
    read: dict[str, Any] = json.loads((trainer.run_dir / name).read_text())
    return read


def test_the_configuration_can_be_given_to_a_trainer_again(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "devices": 1,
        "max_epochs": 2,
        "gradient_clip_val": 0.5,
        "limit_val_batches": 0.5,
        "max_time": timedelta(hours=1),
        "stall_timeout": timedelta(minutes=3),
        "log_every_n_steps": 3,
        "precision": "bf16-mixed",
        "default_root_dir": tmp_path,
    }
    trainer = silent_trainer(**given, logger=CSVLogger(), callbacks=[EarlyStopping("val_loss")])
    trainer.fit(Watched(), loader(8), loader(8))
    written = document(trainer, "config.json")
    assert written["trainer"]["max_epochs"] == 2
    assert written["callbacks"][0] == "EarlyStopping"
    assert written["loggers"] == ["CSVLogger"]
    assert not {"callbacks", "logger"} & written["trainer"].keys()
    again = Trainer(**written["trainer"])
    for name in ("max_epochs", "gradient_clip_val", "limit_val_batches", "log_every_n_steps", "precision"):
        assert getattr(again, name) == given[name], name
    assert again.default_root_dir == str(tmp_path)
    assert again.settings.max_time == timedelta(hours=1)
    assert again.settings.stall_limits == trainer.settings.stall_limits
    assert again.settings.preemption_signals == trainer.settings.preemption_signals


def test_the_configuration_names_versions_commit_command_and_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "a-secret-value")
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--token", "a-secret-value"])
    trainer = silent_trainer(devices=1, max_epochs=1, default_root_dir=tmp_path, logger="csv")
    trainer.fit(Watched(), loader(8))
    written = document(trainer, "config.json")
    expected = {"phalanx": phalanx.__version__, "torch": torch.__version__, "python": platform.python_version()}
    assert written["versions"] == expected
    assert written["host"] == socket.gethostname()
    assert written["command"] == f"{sys.executable} train.py --token ***"
    assert (written["resolved"]["accelerator"], written["resolved"]["devices"]) == ("cpu", 1)
    assert written["git_commit"] is None or len(written["git_commit"]) == 40


def test_the_commit_is_that_of_the_repository(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@e"]
    assert git_commit(tmp_path) is None
    subprocess.run([*git, "init", "-q"], check=True)
    assert git_commit(tmp_path) is None
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "m"], check=True)
    found = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert git_commit(tmp_path) == found


def test_the_report_has_times_checkpoints_and_the_results_of_evaluations(tmp_path: Path) -> None:
    trainer = silent_trainer(
        devices=1, max_epochs=2, default_root_dir=tmp_path, enable_checkpointing=True,
        callbacks=[ModelCheckpoint(monitor="val_loss", save_last=True)],
    )  # fmt: skip
    trainer.fit(Watched(), loader(8), loader(8))
    report = document(trainer, "report.json")
    assert (report["exit_code"], report["stopped"], report["epochs"]) == (0, None, 2)
    began, ended = datetime.fromisoformat(report["began"]), datetime.fromisoformat(report["ended"])
    assert (ended - began).total_seconds() == pytest.approx(report["duration_seconds"], abs=0.01)
    assert began.utcoffset() == timedelta(0)
    assert Path(report["best_checkpoint"]).is_dir()
    assert Path(report["last_checkpoint"]).name == "last.ckpt"
    assert "test" not in report
    trainer.test(dataloaders=loader(8))
    trainer.validate(dataloaders=loader(8))
    evaluated = report | {"test": [{"test_loss": 2.5}], "validate": [{"val_loss": 1.5}]}
    assert document(trainer, "report.json") == evaluated
    # Another Trainer leaves it alone.
    silent_trainer(devices=1, default_root_dir=tmp_path, enable_checkpointing=True).test(Watched(), loader(8))
    assert document(trainer, "report.json") == evaluated


@pytest.mark.parametrize("given", [True, False], ids=["given", "own"])
def test_the_last_checkpoint_of_the_report_is_the_one_that_auto_resumes_from(tmp_path: Path, given: bool) -> None:
    class Worse(Watched):
        """The first epoch is the best one."""

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", float(self.current_epoch))

    def trainer(max_epochs: int) -> Trainer:
        saver = ModelCheckpoint(
            tmp_path / "kept" if given else None, monitor="val_loss", save_top_k=2, keep_last=1, filename="{epoch}"
        )
        return silent_trainer(
            devices=1, max_epochs=max_epochs, default_root_dir=tmp_path, enable_checkpointing=True, callbacks=[saver]
        )

    fitted = trainer(3)
    fitted.fit(Worse(), loader(8), loader(8))
    report = document(fitted, "report.json")
    assert Path(report["best_checkpoint"]).name == "epoch=0.ckpt"
    assert Path(report["last_checkpoint"]).name == "epoch=2.ckpt"
    resumed = trainer(4)
    resumed.fit(Worse(), loader(8), loader(8), ckpt_path="auto")
    assert resumed.ckpt_path == report["last_checkpoint"]
    assert Path(document(resumed, "report.json")["last_checkpoint"]).name == "epoch=3.ckpt"


def test_checkpoints_of_weights_are_not_the_last_one_to_resume_from(tmp_path: Path) -> None:
    trainer = silent_trainer(
        devices=1, max_epochs=1, default_root_dir=tmp_path, enable_checkpointing=True,
        callbacks=[ModelCheckpoint(save_weights_only=True)],
    )  # fmt: skip
    trainer.fit(Watched(), loader(8), loader(8))
    report = document(trainer, "report.json")
    assert Path(report["best_checkpoint"]).is_dir()
    assert report["last_checkpoint"] is None


def test_the_report_of_a_failure_has_its_exit_code(tmp_path: Path) -> None:
    class Failing(Watched):
        def on_train_epoch_end(self) -> None:
            raise KeyError("planted")

    trainer = silent_trainer(devices=1, max_epochs=1, default_root_dir=tmp_path, logger="csv")
    with pytest.raises(KeyError):
        trainer.fit(Failing(), loader(8))
    report = document(trainer, "report.json")
    assert (report["exit_code"], report["stopped"]) == (1, "KeyError: 'planted'")
