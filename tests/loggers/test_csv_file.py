"""``CSVLogger``: what stands in the files, whatever happens to the run."""

from __future__ import annotations

import csv
import resource
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from messages import refuses

from phalanx.framework.core.errors import ConfigurationError, StorageError
from phalanx.loggers import CSVLogger


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_rows_have_a_column_for_each_key_in_alphabetical_order(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 0.5, "epoch": 0}, 49)
    logger.log_metrics({"acc": torch.tensor(0.25).item(), "epoch": 0}, 99)
    logger.finalize("success")
    assert (Path(logger.log_dir) / "metrics.csv").read_text().splitlines() == [
        "acc,epoch,loss,step",
        ",0,0.5,49",
        "0.25,0,,99",
    ]


def test_a_new_key_rewrites_the_header_and_keeps_earlier_rows(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.save()
    logger.log_metrics({"val_loss": 2.0}, 1)
    logger.save()
    logger.log_metrics({"loss": 3.0}, 2)
    logger.save()
    assert rows(logger) == [
        {"loss": "1.0", "step": "0", "val_loss": ""},
        {"loss": "", "step": "1", "val_loss": "2.0"},
        {"loss": "3.0", "step": "2", "val_loss": ""},
    ]


def test_a_disk_without_room_for_a_new_column_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    for step in range(20):
        logger.log_metrics({"loss": 1.0}, step)
    logger.save()
    before = (Path(logger.log_dir) / "metrics.csv").read_bytes()
    logger.log_metrics({"val_loss": 2.0}, 20)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limit[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            logger.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {path.name for path in Path(logger.log_dir).iterdir()} == {"metrics.csv", "hparams.yaml"}
    assert (Path(logger.log_dir) / "metrics.csv").read_bytes() == before


def test_rows_are_written_every_n_steps_and_nothing_before_the_first_figure(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=2)
    assert not (tmp_path / logger.name).exists()
    logger.log_metrics({"loss": 1.0}, 0)
    assert not (Path(logger.log_dir) / "metrics.csv").exists()
    logger.log_metrics({"loss": 2.0}, 1)
    assert len(rows(logger)) == 2


def test_a_resumed_run_appends_to_the_file_it_finds(tmp_path: Path) -> None:
    for step in range(2):
        logger = CSVLogger()
        logger.attach(tmp_path, "run", 3)
        logger.log_metrics({"loss": float(step)}, step)
        logger.finalize("success")
    assert logger.log_dir == str(tmp_path / "run" / "version_3")
    assert [row["step"] for row in rows(logger)] == ["0", "1"]


def test_a_row_cut_off_by_a_kill_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "run" / "version_0" / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text("loss,step\r\n0.5,0\r\n0.2")
    logger = CSVLogger(tmp_path, "run", 0)
    logger.log_metrics({"acc": 1.0}, 2)
    logger.finalize("success")
    assert rows(logger) == [
        {"acc": "", "loss": "0.5", "step": "0"},
        {"acc": "", "loss": "0.2", "step": ""},
        {"acc": "1.0", "loss": "", "step": "2"},
    ]


def test_the_users_directory_wins_over_the_runs(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "mine", name="exp", version="first")
    logger.attach(tmp_path / "other", "run", 7)
    assert logger.log_dir == str(tmp_path / "mine" / "exp" / "first")
    assert CSVLogger(tmp_path, name="", version=2).log_dir == str(tmp_path / "version_2")


def test_a_fixed_directory_is_never_shared_by_two_runs_and_found_again_by_its_own(tmp_path: Path) -> None:
    def log(root: Path) -> str:
        logger = CSVLogger(tmp_path / "logs", "exp")
        logger.attach(root, "run", 0)
        logger.log_metrics({"loss": 1.0}, 0)
        logger.finalize("success")
        return Path(logger.log_dir).name

    assert log(tmp_path / "a") == "version_0"
    assert log(tmp_path / "b") == "version_1"
    assert log(tmp_path / "a") == "version_0"
    assert CSVLogger(tmp_path / "logs", "exp").version == 2


def test_what_was_logged_before_the_run_stays_with_it_and_another_run_gets_its_own(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "mine", "exp")
    logger.log_metrics({"loss": 1.0}, 0)
    logger.save()
    for version in (0, 0, 1):
        logger.attach(tmp_path / "runs", "run", version)
        logger.log_metrics({"loss": 2.0}, 1)
    logger.finalize("success")
    found = {path.parent.name: len(path.read_text().splitlines()) for path in tmp_path.rglob("metrics.csv")}
    assert found == {"version_0": 4, "version_1": 2}


def test_prefix_goes_before_every_key_but_step(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, prefix="gan")
    logger.log_metrics({"loss": 1.0})
    logger.log_metrics({"loss": 2.0})
    logger.finalize("success")
    assert rows(logger) == [{"gan-loss": "1.0", "step": "0"}, {"gan-loss": "2.0", "step": "1"}]


def test_hyperparameters_are_yaml(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    logger = CSVLogger(tmp_path)
    given = {
        "lr": 1e-5,
        "big": 1.5e20,
        "steps": 10,
        "name": "no",
        "yes": None,
        "layers": [1, 2],
        "nested": {"a": True, "b c": "x: y"},
        "inf": float("inf"),
        "text": "Grüße\n# no comment",
        "0x1": (1, 2),
    }
    logger.log_hyperparams(given)
    logger.log_hyperparams(Namespace(more=1, device=torch.device("cpu")))
    read = yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text(encoding="utf-8"))
    assert read == {**given, "0x1": [1, 2], "more": 1, "device": "cpu"}


def test_wrong_arguments_and_directories_are_refused(tmp_path: Path) -> None:
    with refuses(ConfigurationError, "flush_logs_every_n_steps=0"):
        CSVLogger(flush_logs_every_n_steps=0)
    with refuses(ConfigurationError, "version=1.5"):
        CSVLogger(version=1.5)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    logger = CSVLogger(tmp_path / "file")
    logger.log_metrics({"loss": 1.0}, 0)
    with refuses(StorageError, "version_0"):
        logger.save()
