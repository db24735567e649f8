"""``phalanx metrics``: a run for Prometheus from its files, also one that has ended or was killed."""

from __future__ import annotations

import json
import re
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from command_terminal import command
from made_runs import GONE, ended, running, write_run
from messages import says
from prometheus_client.parser import text_string_to_metric_families
from ranks import completed, started_command, wait_until
from small_fits import Tiny, loader, quiet_trainer

from phalanx.callbacks import LambdaCallback
from phalanx.cli.commands import METRICS_ADDRESS, METRICS_PORT
from phalanx.framework.report.prometheus import ADDRESS, PORT

Samples = dict[str, dict[tuple[str, ...], float]]


def parsed(text: str) -> Samples:
    """Return samples by name, and by the values of their labels but the run."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for name, value in sorted(sample.labels.items()) if name != "run")
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def once(directory: Path) -> Samples:
    done = command("metrics", directory, "--once", cwd=directory)
    assert done.returncode == 0, done.stdout
    return parsed(done.stdout)


def state_of(samples: Samples) -> str:
    (state,) = [labels[0] for labels, value in samples["phalanx_state"].items() if value == 1]
    return state


def test_a_finished_run_is_printed(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, [LambdaCallback()], logger="csv", max_epochs=2, log_every_n_steps=1)
    trainer.fit(Tiny(), loader())
    samples = once(tmp_path)
    assert state_of(samples) == "finished"
    for name, value in {"step": 8, "steps": 8, "epoch": 2, "exit_code": 0, "attempts": 1, "restarts": 0}.items():
        assert samples[f"phalanx_{name}"] == {(): float(value)}, name
    metric = samples["phalanx_metric_train_loss_epoch"]["train_loss_epoch",]
    assert metric == pytest.approx(float(trainer.callback_metrics["train_loss_epoch"]))
    assert samples["phalanx_logged_step"]["train_loss_epoch",] == 7


def test_a_killed_run_is_printed(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        {"begin": {"time": 100.0, "step": 0, "attempt": 0, "checkpoint": None}},
        {"step": 4, "time": 101.0, "values": {"val/loss": 0.5}},
        {"begin": {"time": 110.0, "step": 2, "attempt": 1, "checkpoint": "a"}},
        {"step": 6, "time": 111.0, "values": {"val/loss": 0.25}},
    ]
    write_run(tmp_path / "version_0", status=running(pid=GONE), events=events)
    samples = once(tmp_path)
    assert state_of(samples) == "killed"
    assert samples["phalanx_attempts"] == {(): 2.0}
    assert samples["phalanx_restarts"] == {(): 1.0}
    assert samples["phalanx_metric_val_loss"] == {("val/loss",): 0.25}
    assert samples["phalanx_logged_step"] == {("val/loss",): 6.0}
    assert "phalanx_exit_code" not in samples
    assert samples["phalanx_last_sign_of_life_timestamp_seconds"][()] > 100


def test_the_files_are_read_again_for_each_request(tmp_path: Path) -> None:
    run = tmp_path / "version_0"
    write_run(run, status=running())
    with started_command([sys.executable, "-m", "phalanx", "metrics", str(run), "--port", "0"], tmp_path) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"(http://127.0.0.1:\d+/metrics) has the metrics of ", line)
        assert found, line

        def state() -> str:
            with urllib.request.urlopen(found[1], timeout=10) as answer:
                return state_of(parsed(answer.read().decode()))

        assert state() == "running"
        (run / "report.json").write_text(json.dumps(ended(1, "RuntimeError: planted")))
        wait_until(lambda: state() == "failed")
        process.send_signal(signal.SIGINT)
        assert completed(process, 20.0).returncode == 0


def test_the_command_and_the_logger_have_the_same_defaults() -> None:
    assert (METRICS_PORT, METRICS_ADDRESS) == (PORT, ADDRESS)


def test_a_wrong_port_and_a_missing_run_are_refused(tmp_path: Path) -> None:
    done = command("metrics", "--port", "70000", cwd=tmp_path)
    assert done.returncode == 78
    says(done.stdout, "port=70000")
    assert command("metrics", tmp_path / "nothing", cwd=tmp_path).returncode == 78
