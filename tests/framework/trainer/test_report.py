"""What a person sees: one box before the first step, one after the last, each line once, and commands that work."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from model_script import MODEL
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks, run_script
from torch.utils.data import DataLoader, IterableDataset

from phalanx import AccumulationSchedule, Trainer
from phalanx.callbacks import ModelCheckpoint
from phalanx.framework.core.wording import counted
from phalanx.framework.trainer.console_summary import box
from phalanx.loggers import CSVLogger


class Watched(Regressor):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1.0)


def shown(text: str, title: str) -> list[str]:
    """Return the lines of a box."""
    (found,) = re.findall(rf"┌─ {title} ─+┐\n(.*?)└", text, re.DOTALL)
    return [line.strip("│ ") for line in str(found).strip().splitlines()]


def ended(text: str) -> dict[str, str]:
    """Return what is said at the end of a fit, by its titles: the last box, and the lines below it."""
    below = [line.strip() for line in text.partition("┌─ done")[2].partition("┘\n")[2].splitlines()]
    return dict(line.split(maxsplit=1) for line in [*shown(text, "done"), *below])


def fitted(root: Path, data: Any = None, ckpt_path: str | None = None, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": 1, "default_root_dir": root, "max_epochs": 1, **quiet, **arguments}
    )
    trainer.fit(Watched(), loader(32) if data is None else data, loader(8), ckpt_path=ckpt_path)
    return trainer


def test_a_box_fits_its_lines() -> None:
    assert box("t", ["a long line", "b"]).splitlines() == [
        "┌─ t ─────────┐",
        "│ a long line │",
        "│ b           │",
        "└─────────────┘",
    ]
    assert len({len(line) for line in box("a title", ["b"]).splitlines()}) == 1


@pytest.mark.parametrize(
    ("number", "what", "expected"),
    [(1, "epoch", "1 epoch"), (2, "epoch", "2 epochs"), (0, "step", "0 steps"), (2, "micro-batch", "2 micro-batches")],
)
def test_singular_and_plural(number: int, what: str, expected: str) -> None:
    assert counted(number, what) == expected


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(loader(8).dataset)


@pytest.mark.parametrize(
    ("arguments", "data", "batch", "length"),
    [
        ({}, None, "4 x 1 x 1 = 4 samples", "1 epoch, 8 optimizer steps an epoch"),
        ({"accumulate_grad_batches": 3}, None, "4 x 3 x 1 = 12 samples", "1 epoch, 3 optimizer steps an epoch"),
        ({"accumulate_grad_batches": {0: 2, 4: 8}}, None, "4 x (2 from epoch 0, 8 from epoch 4) x 1", "1 epoch, 4"),
        (
            {"accumulate_grad_batches": AccumulationSchedule.cycle([1, 2])},
            None,
            "4 x (cycle of 1, 2) x 1",
            "1 epoch, 6 optimizer steps",
        ),
        ({"max_steps": 1}, loader(4), "4 x 1 x 1 = 4 samples", "1 epoch or 1 step, 1 optimizer step an epoch"),
        ({}, DataLoader(Stream(), batch_size=2), "2 x 1 x 1 = 2 samples", "1 epoch, an epoch ends with its data"),
        ({}, list(loader(8)), "1 x 1 x 1 = 1 micro-batch", "1 epoch, 2 optimizer steps an epoch"),
        ({}, loader(32, shuffle=True), "4 x 1 x 1 = 4 samples", "1 epoch, 8 optimizer steps"),
    ],
)
def test_the_first_box_tells_the_global_batch(
    arguments: dict[str, Any], data: Any, batch: str, length: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted(tmp_path, data, enable_checkpointing=False, **arguments)
    lines = shown(capsys.readouterr().out, "phalanx")
    assert lines[0] == "strategy   single, 1 rank on cpu, precision 32-true"
    assert lines[1].startswith(f"batch      micro-batch x window x ranks: {batch}")
    assert lines[2].startswith(f"length     {length}")
    assert len(lines) == 3


def test_the_last_box_of_a_finished_run_says_that_nothing_was_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        fitted(tmp_path, callbacks=[ModelCheckpoint()], ckpt_path="auto")
    first, second = re.findall(r"trained +(.*?) *│", capsys.readouterr().out)
    assert first == "8 optimizer steps, 1 epoch"
    assert second == "nothing more: it had finished after 8 optimizer steps, 1 epoch"


def test_the_boxes_name_files_that_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fitted(tmp_path, logger="tensorboard", callbacks=[ModelCheckpoint(monitor="val_loss")])
    text = capsys.readouterr().out
    first = shown(text, "phalanx")
    remark = "no values of steps: the fit has 8, and log_every_n_steps is 50"
    assert first[3:] == ["logs       phalanx_logs/version_0", remark, "saves      phalanx_logs/version_0/checkpoints"]
    last = ended(text)
    assert last["trained"] == "8 optimizer steps, 1 epoch"
    assert last["best"] == "val_loss = 1"
    assert Path(last["checkpoint"]).is_dir()
    Watched.load_from_checkpoint(last["checkpoint"])
    assert last["resume"].startswith('fit(..., ckpt_path="auto")')
    program, *arguments = shlex.split(last["curves"])
    assert arguments == ["--logdir", "phalanx_logs/version_0"]
    assert shutil.which(program) is not None
    assert list(Path("phalanx_logs/version_0").glob("events.out.tfevents.*"))
    report = json.loads(Path("phalanx_logs/version_0/report.json").read_text())
    assert (report["epochs"], report["optimizer_steps"]) == (1, 8)
    assert json.loads(Path("phalanx_logs/version_0/config.json").read_text())["resolved"]["max_epochs"] == 1
    # The command that is shown.
    again = Trainer(accelerator="cpu", logger="tensorboard", enable_progress_bar=False, max_epochs=2,
                    enable_model_summary=False, callbacks=[ModelCheckpoint(monitor="val_loss")])  # fmt: skip
    again.fit(Watched(), loader(32), loader(8), ckpt_path="auto")
    assert again.global_step == 16
    resumed = shown(capsys.readouterr().out, "phalanx")[-1]
    assert resumed.startswith("resumes ")
    assert resumed.endswith("epoch 1, batch 0, step 8")


def test_checkpoints_elsewhere_are_resumed_from_by_their_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted(tmp_path, callbacks=[ModelCheckpoint(dirpath=tmp_path / "mine")])
    text = capsys.readouterr().out
    assert f"saves      {tmp_path / 'mine'}" in shown(text, "phalanx")
    (path,) = re.findall(r'ckpt_path="(.*?)"', text)
    assert Path(path).is_dir()
    assert Path(path).parent == tmp_path / "mine"


def test_a_table_of_metrics_is_shown_by_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fitted(tmp_path, logger="csv", enable_checkpointing=False)
    last = ended(capsys.readouterr().out)
    *_, command, directory = shlex.split(last["curves"])
    assert command == "report"
    assert (Path(directory) / "metrics.csv").is_file()


def test_a_stop_gives_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stopping(Watched):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                self.trainer.request_stop("enough is enough")

    trainer = Trainer(
        accelerator="cpu", max_epochs=3, logger=False, enable_progress_bar=False, default_root_dir=tmp_path
    )
    trainer.fit(Stopping(), loader(32))
    last = ended(capsys.readouterr().out)
    assert last["trained"].endswith(": enough is enough")
    # The same fit would stop there again.
    assert [*last] == ["trained", "checkpoint", "report"]


@pytest.mark.parametrize(("log_every", "remark"), [(9, True), (8, False), (0, False)])
def test_a_fit_that_ends_before_the_first_logged_step_is_remarked_on(
    log_every: int, remark: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted(tmp_path, logger="csv", enable_checkpointing=False, log_every_n_steps=log_every)
    text = capsys.readouterr().out
    assert ("the fit has 8, and log_every_n_steps is 9" in text) is remark
    assert ("no values of steps" in text) is remark


@pytest.mark.parametrize("is_beside", [True, False])
def test_the_command_for_curves_runs_where_the_environment_is_not_activated(
    is_beside: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_beside:
        link = tmp_path / "a folder" / "python"
        link.parent.mkdir()
        link.symlink_to(sys.executable)
        monkeypatch.setattr(sys, "executable", str(link))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    fitted(tmp_path, logger="tensorboard", enable_checkpointing=False)
    last = ended(capsys.readouterr().out)
    program, *arguments = shlex.split(last["curves"])
    assert Path(program).absolute() == Path(sys.executable).with_name("tensorboard" if is_beside else "python")
    assert arguments[: -2 if is_beside else 2] == ([] if is_beside else ["-m", "tensorboard.main"])
    assert importlib.util.find_spec("tensorboard.main") is not None
    assert list(Path(arguments[-1]).glob("events.out.tfevents.*"))


def test_nothing_is_shown_when_measuring(capfd: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(accelerator="cpu", max_epochs=1, barebones=True)
    trainer.fit(Watched(), loader(32), loader(8))
    trainer.validate(Watched(), loader(8))
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_quiet_trainer_shows_warnings_only(
    by_variable: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noting(Watched):
        def on_train_start(self) -> None:
            self.trainer.note("a warning")

    if by_variable:
        monkeypatch.setenv("PHALANX_QUIET", "1")
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=tmp_path, verbose=by_variable,
                      callbacks=["progress_bar", "model_summary"], log_every_n_steps=1)  # fmt: skip
    trainer.fit(Noting(), loader(32), loader(8))
    trainer.validate(Watched(), loader(8))
    trainer.print("asked for")
    captured = capfd.readouterr()
    assert captured.out == "a warning\nasked for\n"
    assert captured.err == ""
    assert (trainer.run_dir / "report.json").exists()


def printed_by_a_rank() -> str:
    trainer = Trainer(accelerator="cpu", strategy="ddp", devices="auto", barebones=True)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        trainer.print("asked", "for")
    return shown.getvalue()


def test_only_rank_0_prints() -> None:
    assert run_on_ranks(2, printed_by_a_rank) == ["asked for\n", ""]


@pytest.mark.parametrize("given", ["0", "", None])
def test_the_variable_can_be_off(
    given: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PHALANX_QUIET", raising=False) if given is None else monkeypatch.setenv("PHALANX_QUIET", given)
    fitted(tmp_path, enable_checkpointing=False)
    assert "┌─ phalanx" in capsys.readouterr().out


def test_evaluation_shows_its_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = fitted(tmp_path, enable_checkpointing=False)
    capsys.readouterr()
    trainer.validate(dataloaders=loader(8))
    assert capsys.readouterr().out == "validate: val_loss = 1\n"
    trainer.validate(dataloaders=loader(8), verbose=False)
    assert capsys.readouterr().out == ""


_SCRIPT = f"""{MODEL}
class M(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", super().training_step(batch, batch_idx))

if __name__ == "__main__":
    trainer = Trainer(accelerator="cpu", devices=2, max_epochs=2)
    trainer.fit(M(), loader(8, 2), loader(8, 2))
    trainer.validate(dataloaders=loader(8, 2))
    sys.stdout.write(f"LEFT {{trainer.global_step}}\\n")
"""


def test_two_ranks_show_each_line_once_and_warn_of_nothing() -> None:
    on_one_core = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    done = run_script(on_one_core + _SCRIPT, flags=["-W", "default"])
    assert done.returncode == 0, done.stdout
    boxes = [line for line in done.stdout.splitlines() if line.startswith(("┌", "validate:", "│ batch", "│ trained"))]
    assert len(boxes) == 5, done.stdout
    assert done.stdout.startswith("2 ranks share one core")
    assert done.stdout.count("ranks share one core") == 1
    assert "2 x 1 x 2 = 4 samples" in done.stdout
    # What others than rank 0 print is in the files of the run.
    assert done.stdout.count("LEFT 4") == 1
    assert "Warning" not in done.stdout


def test_two_quiet_ranks_show_nothing_of_their_own() -> None:
    done = run_script(_SCRIPT, env={"PHALANX_QUIET": "1"})
    assert (done.returncode, done.stdout) == (0, "LEFT 4\n")
    failing = _SCRIPT.replace("loss = super", "raise ValueError('planted')\n        loss = super")
    done = run_script(failing, env={"PHALANX_QUIET": "1"})
    assert done.returncode == 1
    assert "ValueError: planted" in done.stdout
    assert "┌" not in done.stdout


def test_the_other_ranks_say_nothing(tmp_path: Path) -> None:
    assert run_on_ranks(2, times_shown, str(tmp_path)) == [1, 0]


def times_shown(root: str) -> int:
    notes: list[str] = []

    class Hearing(Trainer):
        def note(self, text: str) -> None:
            if self.is_global_zero:
                notes.append(text)

    trainer = Hearing(
        accelerator="cpu", devices=2, default_root_dir=root, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2,
    )  # fmt: skip
    trainer.fit(Regressor(), loader(32))
    return sum("4 x 2 x 2 = 16 samples" in note for note in notes)


def test_logs_and_checkpoints_share_the_directory_of_the_first_logger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in (0, 1):
        logger = CSVLogger(tmp_path / "given", name="exp")
        trainer = Trainer(
            accelerator="cpu", devices=1, max_epochs=1, default_root_dir=tmp_path / "other", logger=logger,
            enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        )  # fmt: skip
        trainer.fit(Regressor(), loader(8))
        run = tmp_path / "given" / "exp" / f"version_{version}"
        assert Path(logger.log_dir) == trainer.run_dir == run
        assert list((run / "checkpoints").iterdir())
        assert (run / "report.json").exists()
        assert re.search(rf"logs +{re.escape(str(run))} ", capsys.readouterr().out)
    assert not (tmp_path / "other").exists()


def test_the_directory_of_logs_is_shown_where_a_logger_has_a_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = CSVLogger(tmp_path, name="exp", version="mine")
    silent_trainer(devices=1, max_epochs=1, logger=logger).fit(Regressor(), loader(8))
    assert re.search(rf"logs +{re.escape(str(tmp_path / 'exp' / 'mine'))} ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("ranks", "cores", "told"), [(64, 2, "2 cores"), (2, 2, ""), (3, 2, "2 cores"), (2, 1, "one core")]
)
def test_more_ranks_than_cores_are_remarked_on(
    ranks: int, cores: int, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.framework.parallel.resources.usable_cores", lambda: cores)
    Trainer(accelerator="cpu", devices=ranks)
    shown = f"{ranks} ranks share {told}, so each of them waits for the others most of the time: set devices to at most"
    text = capsys.readouterr().out
    assert text.count("\n") == bool(told)
    assert not told or text == f"{shown} {cores}, or use more machines.\n"
