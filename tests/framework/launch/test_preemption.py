"""A run that is told from outside to end finishes its step, saves, and ends with a code that says so."""

from __future__ import annotations

import multiprocessing
import multiprocessing.synchronize
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import Regressor, loader, silent_trainer
from ranks import run_script, wait_until

from phalanx import Trainer
from phalanx.callbacks import LambdaCallback, ModelCheckpoint
from phalanx.checkpoint import open_checkpoint, verify
from phalanx.cli import job, submission
from phalanx.framework.core.errors import ConfigurationError, Preempted
from phalanx.framework.distributed.control import Triggers
from phalanx.framework.distributed.world import World
from phalanx.framework.launch.signals import SignalWatch, check_signals
from phalanx.framework.launch.slurm import TimeLimit
from phalanx.framework.system.launcher_env import Job

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from phalanx import Trainer, TrainModule, seed_everything
from phalanx.loggers import CSVLogger

root, strategy, ranks, moment, what, whom, workers = sys.argv[1:]
told = False

def tell():
    global told
    told = True
    number = getattr(signal, what)
    if whom == "launcher":
        os.kill(os.getppid(), number)
    elif whom == "group":
        os.killpg(0, number)
    else:
        os.kill(os.getpid(), number)

def at(name, step, rank):
    if moment == f"{name} {step}" and rank == int(ranks) - 1 and not told:
        tell()

class Model(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    def training_step(self, batch, index):
        at("step", self.global_step, self.global_rank)
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss
    def validation_step(self, batch, index):
        at("validation", self.global_step, self.global_rank)
        self.log("val", self.net(batch[0]).mean())
    def on_save_checkpoint(self, checkpoint):
        at("save", self.global_step, self.global_rank)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

if __name__ == "__main__":
    seed_everything(3)
    data = TensorDataset(torch.randn(48, 4))
    trainer = Trainer(
        strategy=strategy, devices=int(ranks), accelerator="cpu", max_epochs=2, default_root_dir=root,
        logger=CSVLogger(root), enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        val_check_interval=4, num_sanity_val_steps=0,
    )
    model = Model()
    trainer.fit(model, DataLoader(data, 2, shuffle=True, num_workers=int(workers)), DataLoader(data, 8),
                ckpt_path="auto")
    if trainer.is_global_zero:
        print("ENDED", trainer.global_step, float(sum(p.double().sum() for p in model.parameters())))
"""


def run(root: Path, strategy: str, ranks: int, moment: str, what: str, whom: str, workers: int = 0) -> tuple[int, str]:
    done = run_script(SCRIPT, str(root), strategy, str(ranks), moment, what, whom, str(workers))
    return done.returncode, done.stdout


def saved_step(root: Path) -> int:
    """Return the optimizer step of the checkpoint that a run left as it was told to end."""
    (path,) = root.rglob("preempted.ckpt")
    assert verify(path) == []
    step: int = open_checkpoint(path).document["progress"]["global_step"]
    return step


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], str]:
    """Return how runs that nobody disturbs end."""
    ended = {}
    for strategy, ranks in (("ddp", 2), ("single", 1)):
        code, output = run(tmp_path_factory.mktemp(strategy), strategy, ranks, "never", "SIGTERM", "rank")
        assert code == 0, output
        ended[strategy, ranks] = next(line for line in output.splitlines() if line.startswith("ENDED"))
    return ended


# When, which signal, to whom, the exit code, and at which steps the run may stop. Each goes on from the one before.
INTERRUPTIONS = {
    ("ddp", 2): [
        ("step 5", "SIGTERM", "group", 75, {6, 7}),
        ("step 8", "SIGINT", "group", 130, {9, 10}),
    ],
    ("single", 1): [
        # Python ends so itself, and a shell makes 130 of it.
        ("step 3", "SIGINT", "rank", -signal.SIGINT, {4}),
        ("validation 8", "SIGUSR2", "rank", 75, {8}),
        ("save 24", "SIGTERM", "rank", 75, {24, 25}),
    ],
}


@pytest.mark.parametrize(("strategy", "ranks"), INTERRUPTIONS)
def test_no_step_is_lost(tmp_path: Path, whole: dict[tuple[str, int], str], strategy: str, ranks: int) -> None:
    workers = 2 if ranks == 2 else 0
    for moment, what, whom, code, steps in INTERRUPTIONS[strategy, ranks]:
        found, output = run(tmp_path, strategy, ranks, moment, what, whom, workers)
        assert found == code, output
        assert saved_step(tmp_path) in steps
    found, output = run(tmp_path, strategy, ranks, "never", "SIGTERM", "rank", workers)
    assert found == 0, output
    assert whole[strategy, ranks] in output.splitlines()


def test_a_run_that_has_not_begun_saves_nothing(tmp_path: Path) -> None:
    class Told(Regressor):
        def on_fit_start(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = silent_trainer(max_steps=5, default_root_dir=tmp_path, enable_checkpointing=True)
    with refuses(Preempted, "SIGTERM", "step 0"):
        trainer.fit(Told(), loader())
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_a_resumed_run_preempted_before_it_trains_loses_nothing(tmp_path: Path, hook: str) -> None:
    def go(root: Path, told: str | None, step: int) -> Regressor:
        torch.manual_seed(4)
        module = Regressor(dropout=0.3)

        def tell(trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == step:
                os.kill(os.getpid(), signal.SIGTERM)

        callbacks = [] if told is None else [LambdaCallback(**{told: tell})]
        trainer = silent_trainer(max_epochs=2, default_root_dir=root, enable_checkpointing=True, callbacks=callbacks)
        trainer.fit(module, loader(shuffle=True), ckpt_path="auto")
        return module

    whole = go(tmp_path / "whole", None, 0).losses
    with refuses(Preempted, "SIGTERM", "step 6"):
        go(tmp_path, "on_train_batch_end", 6)
    with refuses(Preempted, "step 7" if hook == "on_train_epoch_start" else "step 6"):
        go(tmp_path, hook, 6)
    found = go(tmp_path, None, 0).losses
    assert found == whole[-len(found) :]


def test_runs_that_save_into_one_directory_leave_one_anothers_checkpoints(tmp_path: Path) -> None:
    def go(root: str, told_at: int | None, ckpt: str | None = "auto") -> int:
        began = []

        def tell(trainer: Trainer, *_: Any) -> None:
            began.append(trainer.global_step)
            if trainer.global_step == told_at:
                os.kill(os.getpid(), signal.SIGTERM)

        callbacks = [ModelCheckpoint(tmp_path / "shared"), LambdaCallback(on_train_batch_end=tell)]
        trainer = silent_trainer(
            max_epochs=1, default_root_dir=tmp_path / root, enable_checkpointing=True, callbacks=callbacks
        )
        with suppress(Preempted):
            trainer.fit(Regressor(), loader(), ckpt_path=ckpt)
        return began[0]

    assert [go("a", 3), go("b", 2, None), go("a", 5), go("b", 4)] == [1, 1, 4, 3]
    names = sorted(path.name for path in (tmp_path / "shared").iterdir())
    assert names == ["preempted-v1.ckpt", "preempted.ckpt"]
    # What a killed save of such a checkpoint has left goes with the next start.
    left = tmp_path / "shared" / ".preempted-v1.ckpt.0123456789abcdef.tmp"
    shutil.copytree(tmp_path / "shared" / "preempted.ckpt", left)
    assert [go("a", None), go("b", None)] == [6, 5]
    assert not left.exists()


def stay(there: multiprocessing.synchronize.Event) -> None:
    there.set()
    # A signal that comes between two instructions of Python, just before the call, does not interrupt it.
    for _ in range(3000):
        time.sleep(0.01)


def test_a_process_forked_by_a_fit_handles_signals_as_without_the_fit() -> None:
    with SignalWatch(["SIGTERM"]):
        fork = multiprocessing.get_context("fork")
        there = fork.Event()
        process = fork.Process(target=stay, args=(there,))
        process.start()
        # Python drops a signal that comes in the very moment of a fork.
        assert there.wait(5.0)
        process.terminate()
        process.join(5.0)
    try:
        assert process.exitcode == -signal.SIGTERM
    finally:
        process.kill()
        process.join()


def test_ranks_that_have_not_met_have_nothing_to_lose() -> None:
    source = (
        "import os, signal\n"
        "from phalanx.framework.launch.script_launcher import launch_script\n"
        "from phalanx.framework.distributed.world import placement\n"
        "if placement().launcher is None: launch_script(2)\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "import time; time.sleep(60)\n"
    )
    done = run_script(source)
    assert done.returncode == 75
    assert done.stdout.splitlines()[-1].endswith("run the same command again")


def test_in_one_process_the_caller_gets_the_error_and_its_handlers_back(tmp_path: Path) -> None:
    class Told(Regressor):
        def on_train_batch_end(self, *_: object) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        trainer = silent_trainer(max_steps=5, default_root_dir=tmp_path, enable_checkpointing=True)
        with refuses(Preempted, "SIGTERM", "step 1"):
            trainer.fit(Told(), loader())
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert saved_step(tmp_path) == 1


def test_a_run_without_checkpoints_says_that_it_saved_nothing() -> None:
    class Told(Regressor):
        def on_train_batch_end(self, *_: object) -> None:
            os.kill(os.getpid(), signal.SIGUSR1)

    with refuses(Preempted, "SIGUSR1", "step 1"):
        silent_trainer(max_steps=5).fit(Told(), loader())


def test_signals_that_were_not_asked_for_do_what_they_did() -> None:
    before = {name: signal.getsignal(getattr(signal, name)) for name in ("SIGTERM", "SIGUSR1")}
    with SignalWatch(["SIGUSR1"]):
        assert signal.getsignal(signal.SIGTERM) is before["SIGTERM"]
        assert signal.getsignal(signal.SIGUSR1) is not before["SIGUSR1"]
    assert signal.getsignal(signal.SIGUSR1) is before["SIGUSR1"]


def test_ignored_signals_stay_ignored_and_other_threads_handle_none() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with SignalWatch(["SIGUSR1"]):
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
    seen: list[object] = []

    def elsewhere() -> None:
        with SignalWatch(["SIGUSR1"]):
            seen.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_signal_during_set_up_is_handled_later() -> None:
    triggers = Triggers(World.single())
    with SignalWatch(["SIGUSR1"]) as watch:
        os.kill(os.getpid(), signal.SIGUSR1)
        watch.report_to(triggers)
    assert triggers.raised == {"preempt": "SIGUSR1"}


@pytest.mark.parametrize(("given", "name"), [(["SIGTREM"], "'SIGTERM'"), ("SIGTERM", "preemption_signals='SIGTERM'")])
def test_unknown_signals_are_refused(given: object, name: str) -> None:
    with refuses(ConfigurationError, name):
        Trainer(preemption_signals=given)  # type: ignore[arg-type]
    assert check_signals([]) == ()


# ---- jobs of a queue --------------------------------------------------------------------------------------------


class Slow(Regressor):
    """Is told to end by a signal at its third step, if it is given one."""

    def __init__(self, signum: int | None = None) -> None:
        super().__init__()
        self.signum = signum

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        time.sleep(0.01)
        if self.signum is not None and batch_idx == 2:
            os.kill(os.getpid(), self.signum)


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be a job of a queue; return the file to which its command writes what it is called with."""
    calls = tmp_path / "calls"
    command = tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@" >> {calls}\ntest "$2" = 7 || {{ echo "no such job" >&2; exit 1; }}\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return calls


def told(root: Path, module: Regressor, **settings: Any) -> str:
    """Train without an end until the run is told to leave; return with what words it did."""
    trainer = silent_trainer(max_epochs=-1, default_root_dir=root, enable_checkpointing=True, **settings)
    with pytest.raises(Preempted) as ended:
        trainer.fit(module, loader(64))
    return str(ended.value)


def test_a_run_leaves_before_its_job_is_ended(
    tmp_path: Path, queue: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3))
    message = told(tmp_path, Slow(), time_limit_margin={"seconds": 2})
    assert "the job's time is nearly up: stopped after optimizer step" in message
    assert saved_step(tmp_path) > 1
    assert not queue.exists()
    assert "phalanx did not put job 7 back into the queue, since no signal came before" in capsys.readouterr().out


@pytest.mark.parametrize("received", [signal.SIGUSR1, None])
def test_a_job_is_put_back_once_if_its_file_does_so(
    tmp_path: Path,
    queue: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    received: int | None,
) -> None:
    commands = {
        "srun": 'while [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"',
        "python": f"env -0 > {tmp_path}/variables\nexit 75",
    }
    for name, text in commands.items():
        (command := tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        command.chmod(0o755)
    text = submission.slurm_script(job.Job("train", "train.py", (), 1, 1, 0, 0, "", str(tmp_path)))
    script = ["/bin/bash", "-c", text.replace(sys.executable, str(tmp_path / "bin" / "python"))]
    assert subprocess.run(script, check=False).returncode == 75
    assert queue.read_text() == "requeue 7\n"
    # The run that the file has started.
    variables = dict(each.split("=", 1) for each in (tmp_path / "variables").read_text().split("\0") if each)
    for name in variables.keys() - os.environ.keys():
        monkeypatch.setenv(name, variables[name])
    if received is None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 2))
    told(tmp_path, Slow(received))
    assert queue.read_text() == "requeue 7\n"
    assert "put back" not in capsys.readouterr().out


def test_of_a_short_job_half_is_trained() -> None:
    triggers = Triggers(World.single())
    with TimeLimit(Job("7", int(time.time()) + 2), timedelta(minutes=5)) as limit:
        limit.report_to(triggers, "leave")
        assert not triggers.posted
        wait_until(lambda: bool(triggers.posted), seconds=5.0)
    assert triggers.posted.popleft() == ("leave", "time limit")


@pytest.mark.parametrize(("name", "called"), [("SIGUSR1", True), ("SIGUSR2", True), ("SIGTERM", False)])
def test_a_job_that_asked_for_a_signal_is_put_back(
    tmp_path: Path, queue: Path, capsys: pytest.CaptureFixture[str], name: str, called: bool
) -> None:
    told(tmp_path, Slow(getattr(signal, name)))
    assert queue.exists() == called
    assert ("Job 7 was put back into the queue." in capsys.readouterr().out) == called
    assert not called or queue.read_text() == "requeue 7\n"
    queue.unlink(missing_ok=True)
    told(tmp_path / "again", Slow(getattr(signal, name)), requeue=False)
    assert not queue.exists()


def test_an_error_of_the_queue_is_reported(
    tmp_path: Path, queue: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    told(tmp_path, Slow(signal.SIGUSR1))
    assert "Job 5_2 was not put back into the queue: no such job" in capsys.readouterr().out
    assert queue.read_text() == "requeue 5_2\n"


def test_a_time_that_is_none_is_refused(queue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "soon")
    with refuses(ConfigurationError, "SLURM_JOB_END_TIME='soon'"):
        silent_trainer(max_steps=1).fit(Regressor(), loader())
