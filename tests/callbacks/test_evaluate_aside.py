"""``Evaluate(aside=True)``: a process beside the fit, whose results are in the loggers and rank the checkpoints."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import aside_model
import pytest
import torch
from messages import refuses
from models import silent_trainer
from ranks import run_on_ranks, started_script, wait_until
from torch.utils.data import DataLoader

from phalanx.callbacks import Evaluate, ModelCheckpoint
from phalanx.errors import ConfigurationError
from phalanx.framework.system.processes import start_of


def two_fits(strategy: str, root: Path) -> tuple[str, float, list[str]]:
    """Train, and go on from the newest checkpoint; return the best one, its score, and what is retained."""
    aside_model.fit(root, strategy, 4)
    saver = aside_model.fit(root, strategy, 8, ckpt_path="auto")
    score = saver.best_model_score
    assert score is not None
    return Path(saver.best_model_path).name, float(score), sorted(map(os.path.basename, saver.best_k_models))


def logged(run: Path) -> list[tuple[int, float]]:
    with (run / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), float(row["eval/distance"])) for row in csv.DictReader(file) if row["eval/distance"]]


def shown(run: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = EventAccumulator(str(run))
    files.Reload()
    return sorted((each.step, each.value) for each in files.Scalars("eval/distance"))


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2)])
def test_results_are_at_their_steps_once_and_rank_the_checkpoints(strategy: str, ranks: int, tmp_path: Path) -> None:
    for name, score, retained in run_on_ranks(ranks, two_fits, strategy, tmp_path, timeout=180.0):
        assert (name, score) == ("epoch=0-step=2.ckpt", 1.0)
        assert retained == ["epoch=0-step=2.ckpt"]
    (run,) = tmp_path.glob("*/version_0")
    # The result of step 4 came after its checkpoint was saved, from which the second fit has gone on.
    assert logged(run) == shown(run) == [(1, 1.0), (3, 1.0), (5, 3.0), (7, 5.0)]
    assert {path.name for path in (run / "checkpoints").glob("*.ckpt")} == {"epoch=0-step=2.ckpt", "last.ckpt"}
    made = [json.loads(line)["step"] for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert made == [2, 4, 6, 8]
    report = json.loads((run / "report.json").read_text())
    assert report["curves"]["eval/distance"] == {"step": [1, 3, 5, 7], "value": [1.0, 1.0, 3.0, 5.0]}
    assert Path(report["best_checkpoint"]).name == "epoch=0-step=2.ckpt"


def test_a_fit_goes_on_without_an_evaluation_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saver = aside_model.fit(tmp_path, "single", 4, aside_model.broken, devices=1)
    (run,) = tmp_path.glob("*/version_0")
    assert "no such data" in (run / "evaluate.log").read_text()
    # Nothing is deleted that was not ranked.
    assert {path.name for path in (run / "checkpoints").iterdir()} >= {"epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"}
    assert not saver.best_model_path
    printed = capsys.readouterr().out
    assert "exit code 1 (RuntimeError: no such data)" in printed
    assert "for 2 checkpoints" in printed


SCRIPT = """
import sys, time
from pathlib import Path

sys.path.insert(0, {tests!r})
import aside_model
from phalanx.callbacks import LambdaCallback

if __name__ == "__main__":
    slow = LambdaCallback(on_train_batch_start=lambda *_: time.sleep(0.3))
    aside_model.fit(Path(sys.argv[1]), {strategy!r}, 60, devices={ranks}, callbacks=[slow])
"""


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2)])
def test_a_killed_fit_leaves_no_process(strategy: str, ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    tests = str(Path(aside_model.__file__).parent)
    script.write_text(SCRIPT.format(tests=tests, strategy=strategy, ranks=ranks))
    # A launcher that is killed leaves the records of its ranks.
    with started_script(script, str(tmp_path), env={"TMPDIR": str(tmp_path)}) as process:
        wait_until(lambda: evaluators(tmp_path), 20.0)
        found = evaluators(tmp_path)
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(start_of(pid) for pid in found))


def evaluators(root: Path) -> list[int]:
    """Return the processes that evaluate a run below a folder."""
    listed = subprocess.run(["ps", "-ewwo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 1) for line in listed.splitlines()]
    return [int(pid) for pid, command in lines if "phalanx eval" in command and str(root) in command]


class Unsaved(aside_model.Line):
    """A model whose checkpoints do not hold its argument."""

    def __init__(self, begin: float) -> None:
        super(aside_model.Line, self).__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), begin))


def test_what_another_process_cannot_load_is_refused(tmp_path: Path) -> None:
    def local(trainer: Any, module: Any) -> dict[str, float]:
        return {}

    class Local(aside_model.Line):
        pass

    for function in (local, lambda *_: {}):
        with refuses(ConfigurationError, "top level"):
            Evaluate(function, aside=True)
    with refuses(ConfigurationError, "every=5"):
        Evaluate(aside_model.distance, every=5, aside=True)
    with refuses(ConfigurationError, "device='cuda'"):
        Evaluate(aside_model.distance, device="cuda")
    evaluate: Any = Evaluate(aside_model.distance, aside=True)
    data: Any = DataLoader(torch.arange(4))  # type: ignore[arg-type]

    with refuses(ConfigurationError, "ModelCheckpoint"):
        silent_trainer(max_steps=1, callbacks=[evaluate]).fit(aside_model.Line(0.0), data)
    for module, said in ((Unsaved(0.0), "save_hyperparameters"), (Local(0.0), "top level")):
        saves = ModelCheckpoint(tmp_path, monitor="eval/distance", mode="min")
        trainer = silent_trainer(max_steps=1, callbacks=[evaluate, saves], enable_checkpointing=True)
        with refuses(ConfigurationError, said):
            trainer.fit(module, data)
