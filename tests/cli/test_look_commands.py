"""``phalanx runs``, ``top``, ``report``, ``why`` and ``compare``, run as a user runs them: on runs of every end."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_terminal import Terminal, answer, command, shown_lines
from hostile import good
from made_runs import CONFIG, GONE, HOSTILE, ended, running, write_run
from ranks import completed, run_command, run_script, started_script, wait_until

SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from phalanx import Trainer, TrainModule
from phalanx.callbacks import ModelCheckpoint

root, what, ranks, restarts, lr = sys.argv[1:]

class Model(TrainModule):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(4, 1)
    def training_step(self, batch, index):
        loss = self.net(batch[0]).square().mean()
        self.log("train/loss", loss)
        if self.global_step == 6 and self.global_rank == self.trainer.world_size - 1:
            if what == "fail":
                raise ValueError("planted <b>")
            if what == "kill":
                time.sleep(1.2)  # More than the time between two entries of the run's files.
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "preempt":
                os.kill(os.getpid(), signal.SIGTERM)
        if self.global_step >= 6 and what == "train":
            time.sleep(0.05)
        return loss
    def validation_step(self, batch, index):
        self.log("val/loss", self.net(batch[0]).square().mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

if __name__ == "__main__":
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(32, 4)), 4 // int(ranks))
    trainer = Trainer(
        strategy="ddp" if int(ranks) > 1 else "auto", devices=int(ranks), accelerator="cpu", default_root_dir=root,
        max_epochs=2000 if what == "train" else 2, log_every_n_steps=1, logger="csv", enable_progress_bar=False,
        enable_model_summary=False, max_restarts=int(restarts), snapshots=False, val_check_interval=2,
        callbacks=[ModelCheckpoint(monitor="val/loss", every_n_train_steps=4, save_top_k=-1)],
    )
    trainer.fit(Model(float(lr)), data, data, ckpt_path="auto" if what == "preempt" else None)
"""


def fit(root: Path, what: str, ranks: int = 1, restarts: int = 0, lr: float = 0.1) -> tuple[int, Path]:
    """Run the script; return its exit code and the run's directory. The file ``screen`` keeps what it has printed."""
    done = run_script(SCRIPT, str(root), what, str(ranks), str(restarts), str(lr), timeout=150.0)
    (root / "screen").write_text(done.stdout)
    (directory,) = root.glob("phalanx_logs/version_*")
    return done.returncode, directory


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of runs: finished ones, one of two ranks that failed twice, preempted and killed ones."""
    root = tmp_path_factory.mktemp("runs")
    codes = {
        "good": fit(root / "good", "good")[0],
        "other": fit(root / "other", "good", lr=0.2)[0],
        "failed": fit(root / "failed", "fail", ranks=2, restarts=1)[0],
        "preempted": fit(root / "preempted", "preempt")[0],
        "killed": fit(root / "killed", "kill")[0],
    }
    assert codes == {"good": 0, "other": 0, "failed": 1, "preempted": 75, "killed": -signal.SIGKILL}
    return root


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Return the directory of a run that trains on two ranks, and its process."""
    with started_script(SCRIPT, str(tmp_path), "train", "2", "0", "0.1") as process:
        directory = tmp_path / "phalanx_logs/version_0"
        wait_until(
            lambda: (directory / "ranks.json").exists() and "train/loss" in (directory / "status.json").read_text()
        )
        yield directory, process
        process.send_signal(signal.SIGTERM)
        completed(process, 60.0)


STATES = {"good": "finished", "other": "finished", "failed": "failed", "preempted": "preempted", "killed": "killed"}


@pytest.mark.timeout(300)
def test_runs_lists_every_end(runs: Path) -> None:
    found = answer("runs", cwd=runs)
    assert (found["schema"], found["count"]) == (1, 5)
    assert {Path(each["path"]).parts[0]: each["state"] for each in found["runs"]} == STATES
    shown = command("runs", "--limit", "2", cwd=runs).stdout.splitlines()
    assert shown[0].split() == ["run", "state", "step", "epochs", "time", "began", "result"]
    assert shown[1].startswith("killed/phalanx_logs/version_0")
    assert shown[3:] == ["3 older runs are not shown: --limit 0 lists all"]
    assert len(command("runs", "--limit", "0", cwd=runs).stdout.splitlines()) == 6
    (empty := runs.parent / "empty").mkdir(exist_ok=True)
    done = command("runs", empty, cwd=runs)
    assert (done.returncode, done.stdout) == (0, f"{empty} holds no runs.\n")
    assert command("runs", "nowhere", cwd=runs).returncode == 78


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "sentence", "lost", "resume"),
    [
        ("good", "finished at step 16 after ", "", None),
        ("failed", "exit code 1: rank 1 (pid {}) failed at step 6 (epoch 0, batch 6): ValueError: planted <b>",
         "2 steps are lost: epoch=0-step=4.ckpt (step 4) is good", "0.1   (with fit(..., ckpt_path=\"auto\"))"),
        ("preempted", "exit code 75: SIGTERM came: stopped after optimizer step 7",
         "nothing lost: preempted.ckpt (step 7) is good", "preempt 1 0 0.1"),
        ("killed", "was killed at about step 6 after ", "about 2 steps are lost", "0.1   (with fit("),
    ],
)  # fmt: skip
def test_why_explains_each_end(runs: Path, name: str, sentence: str, lost: str, resume: str | None) -> None:
    done = command("why", name, cwd=runs)
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    assert text.startswith(f"{name}/phalanx_logs/version_0 ")
    assert re.sub(r"\d+", "{}", sentence) in re.sub(r"\d+", "{}", text)
    assert lost in text
    found = answer("why", name, cwd=runs)
    assert (found["state"], found["why"]["lost"].startswith(lost)) == (STATES[name], True)
    if resume is None:
        assert found["why"]["resume"] is None
    else:
        assert found["why"]["resume"].startswith("python ")
        assert resume in found["why"]["resume"]


def test_checkpoints_of_the_newest_run_are_listed(runs: Path) -> None:
    listed = [command("checkpoint", "list", *name, cwd=runs / "good") for name in ([], ["phalanx_logs/version_0"])]
    assert "step" in listed[0].stdout
    # Their ages differ.
    names = [[line.split()[0] for line in each.stdout.splitlines()] for each in listed]
    assert names[0] == names[1]


@pytest.mark.timeout(300)
def test_a_failed_run_says_how_to_resume_it_last(runs: Path, tmp_path: Path) -> None:
    lost = "2 steps are lost: epoch=0-step=4.ckpt (step 4) is good. To resume: python "
    for directory, start in ((runs / "failed", f"phalanx: {lost}"), (tmp_path, lost)):
        if directory == tmp_path:
            assert fit(tmp_path, "fail")[0] == 1
        last = (directory / "screen").read_text().splitlines()[-1]
        assert last.startswith(start)
        assert last.endswith('(with fit(..., ckpt_path="auto"))')


@pytest.mark.timeout(300)
def test_the_report_in_the_terminal_in_json_and_as_a_page_has_the_same_facts(runs: Path) -> None:
    page = runs / "failed/phalanx_logs/version_0/report.html"
    before = page.read_text()
    found = answer("report", "failed", cwd=runs)
    assert (found["restarts"], found["repeated_steps"], found["optimizer_steps"]) == (1, 2, 6)
    assert found["settings"]["changed"]["max_restarts"] == 1
    # Rank 0 writes its curves once a second, and is ended when another rank has failed.
    steps = found["curves"]["train/loss"]["step"]
    assert steps == list(range(len(steps)))
    assert 4 <= len(steps) <= 6
    assert found["page"] == "failed/phalanx_logs/version_0/report.html"
    assert "ValueError: planted &lt;b&gt;" in before
    assert "planted <b>" not in before
    assert "Restarts and time lost" in before
    text = command("report", "failed", "--out", runs / "page.html", cwd=runs).stdout
    assert "restarts 1, 2 steps trained again" in text
    assert "1 restart, " not in text
    assert text.splitlines()[:2] == ["failed/phalanx_logs/version_0  failed", f" {found['why']['sentence']}"]
    assert "\nhow      ddp, 2 ranks, 32-true\n" in text
    assert (runs / "page.html").read_text() == page.read_text()
    # The supervisor wrote both files, after rank 0 had written them for its own end.
    written = json.loads((page.parent / "report.json").read_text())
    assert written["why"] == found["why"]
    assert written["traceback"].rstrip().endswith("ValueError: planted <b>")
    assert not (runs / "killed/phalanx_logs/version_0/report.json").exists()


@pytest.mark.timeout(300)
def test_compare_shows_settings_results_and_curves(runs: Path) -> None:
    found = answer("compare", "good", "other", cwd=runs)
    assert found["settings"]["hparams.lr"] == [0.1, 0.2]
    assert "max_epochs" not in found["settings"]
    assert found["results"]["optimizer_steps"] == [16, 16]
    first, second = found["metrics"]["val/loss"]
    assert (first["last_step"], second["last_step"]) == (15, 15)
    assert second["last"] < first["last"]
    lines = command("compare", "good", "other", cwd=runs).stdout.splitlines()
    assert re.search(r"^hparams.lr +0.1 +0.2$", "\n".join(lines), re.MULTILINE)
    assert any(line.startswith("val/loss") for line in lines)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "arguments",
    [["runs"], ["why", "failed"], ["report", "failed"], ["compare", "good", "failed"], ["top", "--once", "failed"]],
    ids=lambda arguments: arguments[0],
)
def test_a_terminal_of_80_columns_and_a_pipe(runs: Path, arguments: list[str]) -> None:
    shown = Terminal(arguments, runs).end()
    assert "\x1b[" in shown or arguments[0] == "why"
    lines = shown_lines(shown)
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40
    assert "\x1b" not in Terminal(arguments, runs, {"NO_COLOR": "1"}).end()
    piped = run_command([sys.executable, "-m", "phalanx", *arguments], runs, {"PYTHONIOENCODING": "ascii"})
    assert (piped.returncode, piped.stdout.isascii(), "\x1b" in piped.stdout) == (0, True, False)


@pytest.mark.timeout(300)
def test_a_run_that_trains(training: tuple[Path, subprocess.Popen[str]]) -> None:
    directory, process = training
    root = directory.parents[1]
    shown = command("top", "--once", cwd=root).stdout.splitlines()
    assert shown[0].startswith("phalanx_logs/version_0  running  ddp, 2 ranks on ")
    assert [line.split()[:2] for line in shown if line.startswith("rank ")] == [["rank", "0"], ["rank", "1"]]
    assert any(line.startswith("train/loss") for line in shown)
    found = answer("top", "--once", cwd=root)
    assert (found["state"], found["progress"]["steps"], found["progress"]["batches"]) == ("running", 16_000, 8)
    assert [each["rank"] for each in found["progress"]["ranks"]] == [0, 1]
    assert "is training, at step " in command("why", cwd=root).stdout
    assert answer("runs", cwd=root)["runs"][0]["state"] == "running"
    assert command("report", cwd=root).returncode == 0
    # Pressing q closes the view in a terminal, without ending the run. In a pipe, the view closes when the run ends.
    view = Terminal(["top", "--interval", "0.1"], root, is_new=True)
    view.read_until("\x1b[?1049h")
    view.read_until("q ends the view")
    os.write(view.mine, b"q")
    assert "\x1b[?1049l" in view.end()
    assert process.poll() is None
    with subprocess.Popen(
        [sys.executable, "-m", "phalanx", "top", "--interval", "0.1"], cwd=root, stdout=subprocess.PIPE, text=True
    ) as lines:
        assert lines.stdout is not None
        assert lines.stdout.readline().startswith("running, step ")
        process.send_signal(signal.SIGTERM)
        last = lines.stdout.read().splitlines()[-1]
        assert lines.wait(60.0) == 0
    assert last.startswith("preempted: ended after ")


def test_top_of_a_finished_run_does_not_show_where_in_an_epoch_it_is(tmp_path: Path) -> None:
    config = {**CONFIG, "resolved": {"strategy": "single", "world_size": 1}}
    status = {**running(pid=GONE, age=1e6), "step": 40, "epoch": 2, "batch": 0, "section": "epoch"}
    write_run(tmp_path / "a/version_0", status=status, report=ended(0), config=config)
    head, position, *_ = command("top", "--once", cwd=tmp_path).stdout.splitlines()
    assert head.startswith("a/version_0  finished  single, 1 rank on ")
    assert position == "[====================] 100 %  step 40 of 40, epoch 2 of 2"


def test_a_run_of_another_host_and_hostile_names(tmp_path: Path) -> None:
    status = {**running(host="elsewhere"), "metrics": {HOSTILE: 1.0}}
    write_run(tmp_path / "a/version_0", status=status, events=[{"step": 1, "time": 1.0, "values": {HOSTILE: 1.0}}])
    write_run(tmp_path / "b/version_0", report=ended(1, HOSTILE, best_score={"name": HOSTILE, "value": 1.0}))
    for arguments in (["runs"], ["why", "b"], ["report", "a"], ["compare", "a", "b"], ["top", "--once", "a"]):
        done = command(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stdout
        assert done.stdout.replace("\n", "").isprintable()
    assert {each["state"] for each in answer("runs", cwd=tmp_path)["runs"]} == {"running", "failed"}


def curved(directory: Path, name: str, scale: float) -> Path:
    """Write a run with a curve of 50 values between 12.3 and 9,876.5 times ``scale``."""
    values = [scale * (12.3 + 9864.2 * ((7 * step) % 50) / 49) for step in range(50)]
    events = [{"step": step, "time": 1.0, "values": {name: value}} for step, value in enumerate(values)]
    return write_run(directory, report=ended(0), events=events)


@pytest.mark.parametrize(("length", "with_curves"), [(28, {"compare", "report"}), (44, {"report"}), (90, set())])
def test_a_narrow_terminal_cuts_curves_and_names_but_no_number(
    length: int, with_curves: set[str], tmp_path: Path
) -> None:
    name = "val/" + "n" * (length - 4)
    curved(tmp_path / "a/version_0", name, 1.0)
    curved(tmp_path / "b/version_0", name, 0.1)
    for arguments, heads, number in (
        (["compare", "a", "b"], ["metric", "A", "last", "B", "last", "B", "-", "A"], "-7.8e+03"),
        (["report", "a"], ["metric", "first", "last", "least", "most"], "9876"),
    ):
        lines = shown_lines(Terminal(arguments, tmp_path).end())
        head = next(index for index, line in enumerate(lines) if line.startswith("metric"))
        assert lines[head].split() == heads
        assert len(lines[head + 1]) <= 80
        assert number in lines[head + 1].split()
        assert any(block in lines[head + 1] for block in "▁▂▃▄▅▆▇█") == (arguments[0] in with_curves)


def test_curves_of_two_runs_have_one_range_and_share_the_charts_of_a_page(tmp_path: Path) -> None:
    curved(tmp_path / "a/version_0", HOSTILE, 1.0)
    curved(tmp_path / "b/version_0", HOSTILE, 0.1)
    curved(tmp_path / "high/version_0", "loss", 1.0)
    curved(tmp_path / "low/version_0", "loss", 0.1)
    lines = command("compare", "high", "low", cwd=tmp_path).stdout.splitlines()
    _, _, high, _, low, _ = next(line for line in lines if line.startswith("loss")).split()
    assert "█" in high
    assert set(low) == {"▁"}
    done = command("compare", "a", "b", "--out", "both.html", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "page     both.html"
    page = (tmp_path / "both.html").read_text()
    # The page has one chart, of two lines.
    assert (page.count("<svg "), page.count('<path class="line c')) == (1, 2)
    (data,) = re.findall(r'data-chart="([^"]*)"', page)
    assert [line["label"] for line in json.loads(html.unescape(data))["lines"]] == ["A", "B"]
    assert "<h1>a/version_0 and b/version_0</h1>" in page
    assert "<img" not in page
    for root in ("one", "two"):
        curved(tmp_path / root / "logs/version_0", "loss", 1.0)
    command("compare", "one", "two", "--out", "both.html", cwd=tmp_path)
    assert "<h1>one/logs/version_0 and two/logs/version_0</h1>" in (tmp_path / "both.html").read_text()


def test_a_narrow_list_of_runs_cuts_names_of_metrics_and_no_number(tmp_path: Path) -> None:
    write_run(tmp_path / "a/version_0", report=ended(0, best_score={"name": "val/" + "n" * 80, "value": 0.5}))
    _, line = shown_lines(Terminal(["runs"], tmp_path).end())
    assert re.search(r"  0\.5 val/n+\.\.\.$", line), line


def test_wrong_names_are_answered_in_one_line(tmp_path: Path) -> None:
    write_run(tmp_path / "gpt/version_0", report=ended(0))
    for arguments, expected in (
        (["why", "gtp/version_0"], "Did you mean 'gpt/version_0'?"),
        (["compare", "gpt", "version_1"], "Did you mean 'gpt/version_0'?"),
        (["top", "--interval", "0"], "give 0.1 seconds or more"),
        (["runs", "--limit", "-1"], "give a number of runs"),
    ):
        done = command(*arguments, cwd=tmp_path)
        assert (done.returncode, len(done.stdout.splitlines())) == (78, 1), done.stdout
        assert expected in done.stdout


LIGHT = """
import contextlib, io, json, sys
from phalanx.cli.main import main
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main(arguments) == 0, arguments
    assert shown.getvalue()
    heavy = {"torch", "numpy", "safetensors", "rich", "torchmetrics", "libcst", "asyncio", "multiprocessing"}
    assert heavy.isdisjoint(sys.modules), (arguments, heavy & set(sys.modules))
"""


def test_commands_that_look_at_files_import_no_torch(tmp_path: Path) -> None:
    write_run(tmp_path / "gpt/version_0", report=ended(0))
    good(tmp_path / "a.ckpt")
    commands = [["checkpoint", "inspect", "a.ckpt"], ["checkpoint", "verify", "a.ckpt"], ["checkpoint", "list", "."]]
    commands += [[*each, "--json"] for each in commands]
    commands += [["why"], ["runs"], ["report"], ["top", "--once"]]
    done = run_command([sys.executable, "-c", LIGHT, json.dumps(commands)], tmp_path)
    assert done.returncode == 0, done.stdout


def test_a_page_that_cannot_be_written_does_not_fail_the_command(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "gpt/version_0", report=ended(0))
    (directory / "report.html").mkdir()
    done = command("report", cwd=tmp_path)
    assert done.returncode == 0
    assert command("report", "--out", directory / "report.html", cwd=tmp_path).returncode == 74
