"""``phalanx clean``: old checkpoints and runs are deleted by rule, on a disk and in a bucket."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from called_command import CalledCommand
from small_fits import Tiny, loader

from phalanx import Trainer, checkpoint as library
from phalanx.callbacks import ModelCheckpoint
from phalanx.framework.storage.store import open_store
from phalanx.framework.system.run_directory import directory_at


@pytest.fixture(params=["disk", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    return str(tmp_path / "runs") if request.param == "disk" else f"file://{tmp_path}/runs"


def fitted(root: str, best: int = 0) -> Trainer:
    """Return a fit with six checkpoints, the best of which is that of epoch ``best``, and ``last.ckpt``."""
    figures = [0.0 if epoch == best else 1.0 for epoch in range(6)]
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=6,
        default_root_dir=root,
        callbacks=ModelCheckpoint(monitor="val", save_top_k=-1, save_last=True),
        logger=False,
        verbose=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Tiny({"val": figures}), loader(), loader())
    return trainer


def left(root: str) -> list[str]:
    """Return what there is now, as another machine sees it."""
    names = open_store(root if "://" in root else f"file://{root}").list()
    return sorted(name.split("/")[-2] for name in names if name.endswith(".ckpt/manifest.json"))


def test_the_newest_and_the_best_checkpoint_stay(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    fitted(root, best=2)
    clean = CalledCommand("clean", capsys)
    before = left(root)
    would = json.loads(clean(root, "--keep-last", 2, "--dry-run", "--json").out)
    assert (would["dry_run"], len(would["deleted"]), left(root)) == (True, 3, before)
    done = clean(root, "--keep-last", 2)
    assert done.code == 0
    assert "3 checkpoints deleted" in done.out
    assert left(root) == ["epoch=2-step=12.ckpt", "epoch=4-step=20.ckpt", "epoch=5-step=24.ckpt", "last.ckpt"]
    assert "0 checkpoints deleted" in clean(root, "--keep-last", 2).out
    clean(root)
    assert left(root) == ["epoch=2-step=12.ckpt", "epoch=5-step=24.ckpt", "last.ckpt"]
    folder = f"{root}/phalanx_logs/version_0/checkpoints"
    assert [one.status for one in library.checkpoints(folder, verify=True)] == ["good"] * 3


def test_what_is_younger_stays(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    fitted(root)
    clean = CalledCommand("clean", capsys)
    assert "0 checkpoints deleted" in clean(root, "--older-than", "1h").out
    time.sleep(0.02)
    assert "4 checkpoints deleted" in clean(root, "--older-than", "0.01s").out


def test_runs_are_deleted_whole(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        fitted(root)
        # Runs are sorted by the time of their last change.
        time.sleep(0.02)
    clean = CalledCommand("clean", capsys)
    assert "2 runs deleted" in clean(root, "--runs", "--keep-last", 1).out
    names = open_store(root if "://" in root else f"file://{root}").list()
    assert {name.split("/")[1] for name in names} == {"version_2"}


def test_a_run_that_is_being_written_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(tmp_path)
    fitted(root)
    before, directory = left(root), directory_at(tmp_path / "phalanx_logs" / "version_0")
    directory.acquire(fresh=False)
    try:
        done: Any = json.loads(CalledCommand("clean", capsys)(root, "--json").out)
    finally:
        directory.release()
    assert done["deleted"] == []
    assert f"is being written by process {os.getpid()}" in done["left"][0]
    assert left(root) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runs"], "--runs deletes whole runs: give --older-than SPAN"),
        (["--keep-last", "0"], "--keep-last 0: give a number from 1 on"),
        (["--older-than", "soon"], "--older-than soon: give a time such as 12h, 30d or 4w"),
    ],
)
def test_rules_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    done = CalledCommand("clean", capsys)(tmp_path, *arguments)
    assert done.code == 78
    assert message in done.err
