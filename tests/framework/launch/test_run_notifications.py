"""``Trainer(notify=...)``: each event of a run is sent once, from whichever process knows it, and never fails a run."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hook_server import SECRET, HookServer
from messages import refuses
from model_script import MODEL
from models import Regressor, loader, silent_trainer
from ranks import completed, run_on_ranks, run_script, started_script, wait_until
from small_fits import capturing

from phalanx import Trainer
from phalanx.callbacks import LambdaCallback
from phalanx.cli.main import main
from phalanx.errors import ConfigurationError
from phalanx.framework.diagnostics.loss_checks import WARM_UP
from phalanx.framework.report import notifications

SCRIPT = f"""{MODEL}
root, url, what, ranks, restarts = sys.argv[1:]

class Disturbed(Model):
    def training_step(self, batch, index):
        mark = os.path.join(root, "disturbed")
        if self.global_step == 3 and self.global_rank == self.trainer.world_size - 1 and not os.path.exists(mark):
            if what != "kill again":
                open(mark, "w").close()
            if what.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "raise":
                raise ValueError("planted")
            if what == "hang":
                time.sleep(600)
        if what == "wait":
            time.sleep(0.05)
        return super().training_step(batch, index)

quiet["logger"] = "csv"
if int(restarts) and what == "kill":
    from phalanx.callbacks import ModelCheckpoint
    quiet |= {{"callbacks": ModelCheckpoint(every_n_train_steps=2), "enable_checkpointing": True}}
trainer = Trainer(
    strategy="ddp" if ranks != "1" else "auto", devices=int(ranks), accelerator="cpu", default_root_dir=root,
    max_epochs=1, max_restarts=int(restarts), snapshots=False, notify=url,
    stall_timeout=1.5 if what == "hang" else None, **quiet,
)
trainer.fit(Disturbed(), loader(4000 if what == "wait" else 64))
"""
LINE = SCRIPT.splitlines().index("                time.sleep(600)") + 1


@pytest.fixture
def hooks() -> Iterator[HookServer]:
    with HookServer() as server:
        yield server


def script(folder: Path) -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return path


def ran(folder: Path, hooks: HookServer, what: str, ranks: int = 1, restarts: int = 0) -> tuple[int, str]:
    done = run_script(script(folder), str(folder), hooks.url, what, str(ranks), str(restarts), timeout=60.0)
    return done.returncode, done.stdout


def why(folder: Path) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main(["why", str(folder), "--json"]) == 0
    answer: dict[str, Any] = json.loads(shown.getvalue())
    return answer


def test_the_end_of_a_fit_is_sent_once_with_the_sentence_of_why(tmp_path: Path, hooks: HookServer) -> None:
    trainer = silent_trainer(default_root_dir=tmp_path, logger="csv", max_epochs=1, notify=[hooks.url])
    trainer.fit(Regressor(), loader(16))
    (body,) = hooks.bodies
    assert {name: body[name] for name in ("event", "run", "state", "step")} == {
        "event": "end", "run": "phalanx_logs/version_0", "state": "finished", "step": 4,
    }  # fmt: skip
    assert body["sentence"] == trainer.report().data["why"]["sentence"]
    assert body["text"] == f"phalanx_logs/version_0 {body['sentence']}"
    assert body["time"].endswith("+00:00")
    for file in ("config.json", "report.json"):
        assert SECRET not in (trainer.run_dir / file).read_text()


def test_an_error_is_sent_once_and_without_files_too(tmp_path: Path, hooks: HookServer) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("planted")

    for logger in ("csv", False):
        trainer = silent_trainer(
            default_root_dir=tmp_path, logger=logger, max_epochs=1, notify=hooks.url,
            callbacks=[LambdaCallback(on_train_epoch_end=fail)],
        )  # fmt: skip
        with pytest.raises(ZeroDivisionError):
            trainer.fit(Regressor(), loader(16))
    with_files, without = hooks.bodies
    assert (with_files["event"], with_files["state"], with_files["step"]) == ("end", "failed", 4)
    assert with_files["sentence"].startswith("ended at step 4 after ")
    assert with_files["sentence"].endswith("exit code 1: ZeroDivisionError: planted")
    assert (without["run"], without["state"], without["step"]) == ("a run without files", "failed", 4)
    assert without["sentence"].endswith("exit code 1: ZeroDivisionError: planted")


def test_a_killed_rank_is_restarted_and_the_end_is_sent_once(tmp_path: Path, hooks: HookServer) -> None:
    code, printed = ran(tmp_path, hooks, "kill", ranks=2, restarts=1)
    assert code == 0, printed
    assert hooks.events == ["restart", "end"]
    restart, end = hooks.bodies
    assert restart["step"] == 3
    assert "was killed by SIGKILL at step 3" in restart["sentence"]
    assert restart["sentence"].endswith("the ranks are started again (restart 1 of 1)")
    assert (end["run"], end["state"], end["step"]) == (restart["run"], "finished", 8)
    assert "in 2 attempts" in end["sentence"]
    assert SECRET not in printed


def test_ranks_that_fail_again_send_one_end_which_is_that_of_the_newest_run(tmp_path: Path, hooks: HookServer) -> None:
    code, printed = ran(tmp_path, hooks, "kill again", ranks=2, restarts=3)
    assert code == 137, printed
    assert hooks.events == ["restart", "end"]
    end, found = hooks.bodies[1], why(tmp_path)
    assert found["path"].endswith(end["run"])
    assert (end["state"], end["sentence"]) == ("failed", found["why"]["sentence"])


def test_the_launcher_sends_the_end_of_ranks_that_have_failed(tmp_path: Path, hooks: HookServer) -> None:
    code, printed = ran(tmp_path, hooks, "raise", ranks=2)
    assert code == 1, printed
    (body,) = hooks.bodies
    found = why(tmp_path)
    assert (body["event"], body["state"], body["step"]) == ("end", "failed", found["why"]["step"])
    assert body["sentence"] == found["why"]["sentence"]
    assert "ValueError: planted" in body["sentence"]


def test_a_preempted_run_sends_the_preemption_and_then_its_end(tmp_path: Path, hooks: HookServer) -> None:
    with started_script(script(tmp_path), str(tmp_path), hooks.url, "wait", "2", "0") as process:
        wait_until(lambda: list(tmp_path.rglob("status.json")))
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        done = completed(process, 60.0)
    assert done.returncode == 75, done.stdout
    assert hooks.events == ["preemption", "end"]
    preemption, end = hooks.bodies
    assert "got SIGTERM: the run stops after optimizer step" in preemption["sentence"]
    assert end["state"] == "preempted"
    assert end["step"] == preemption["step"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stall_is_sent_and_then_the_end(tmp_path: Path, hooks: HookServer, ranks: int) -> None:
    code, printed = ran(tmp_path, hooks, "hang", ranks)
    assert code == 76, printed
    assert hooks.events == ["stall", "end"]
    stall, end = hooks.bodies
    assert "stalled: no heartbeat for" in stall["sentence"]
    assert (stall["step"], end["state"], end["step"]) == (3, "stalled", 3)
    assert why(tmp_path)["state"] == "stalled"
    if ranks == 2:
        # The screen has the stacks of all ranks, that of the stalled one last.
        lines = printed.splitlines()
        where = "at step 3 (epoch 0, batch 3); the limit is 1.5 s"
        named = next(number for number, line in enumerate(lines) if where in line)
        assert lines[named].startswith("rank 1 (pid ")
        assert any(f'train.py", line {LINE} in training_step' in line for line in lines[named - 40 : named])
        assert any(line.startswith("rank 0 ") and line.endswith("(waiting for others):") for line in lines)


def test_a_fit_that_only_tries_everything_sends_nothing(tmp_path: Path, hooks: HookServer) -> None:
    trainer = silent_trainer(default_root_dir=tmp_path, fast_dev_run=True, notify=hooks.url)
    trainer.fit(Regressor(), loader(16))
    assert hooks.events == []


class Jumps(Regressor):
    """Has one loss far above the others, on rank 1 or on both ranks."""

    def __init__(self, on_both: bool) -> None:
        super().__init__()
        self.on_both = on_both

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) * 1e-3
        jumps = batch_idx == WARM_UP + 5 and (self.on_both or self.global_rank == 1)
        return loss + (100.0 if jumps else 1.0 + batch_idx % 3 * 0.1)


def jumped(url: str, on_both: bool) -> list[str]:
    trainer = silent_trainer(devices=2, max_epochs=1, notify=url)
    notes = capturing(trainer)
    trainer.fit(Jumps(on_both), loader(8 * (WARM_UP + 10), 4))
    return [note for note in notes if "rose" in note]


@pytest.mark.parametrize("on_both", [False, True])
def test_a_loss_that_rises_is_noted_and_sent_once(hooks: HookServer, on_both: bool) -> None:
    where = f"The loss rose to 100 at optimizer step {WARM_UP + 5} (epoch 0) on rank {0 if on_both else 1}"
    for notes in run_on_ranks(2, jumped, hooks.url, on_both):
        assert notes[0].startswith(where)
        assert on_both or len(notes) == 1
    assert hooks.events == ["loss_spike", "end"]
    assert hooks.bodies[0]["step"] == WARM_UP + 5
    assert hooks.bodies[0]["sentence"].startswith(where)


@pytest.mark.parametrize("what", ["nobody", "refusal", "silence"])
def test_a_dead_server_is_one_warning_without_the_secret(
    tmp_path: Path, hooks: HookServer, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "_CLOSE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent, HookServer(status=404) as refusing:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/{SECRET}"
        if what == "nobody":
            silent.close()
        elif what == "refusal":
            url = refusing.url
        trainer = silent_trainer(default_root_dir=tmp_path, max_epochs=1, notify=[url, hooks.url])
        notes = capturing(trainer)
        began = time.monotonic()
        trainer.fit(Regressor(), loader(16))
    assert time.monotonic() - began < 30
    (warning,) = [note for note in notes if "notification" in note]
    assert warning.startswith("A notification was not delivered: http://127.0.0.1:")
    assert warning.endswith(". The run is not affected.")
    reason = {"nobody": "Connection refused", "refusal": "HTTP 404: Not Found", "silence": "not answered in time"}[what]
    assert reason in warning
    assert SECRET not in warning
    assert trainer.state.finished
    assert hooks.events == ["end"]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (f"hooks.example.com/{SECRET}", "notify='***' must be an address"),
        (f"ftp://example.com/{SECRET}", "notify='ftp://example.com/***'"),
        (f"https:///{SECRET}", "has a host"),
        (f"https://me:{SECRET}@example.com/a", "notify='https://example.com/***'"),
        ("https://hooks.example.com/***", "lacks its secret part"),
        ("env:NO_SUCH_HOOK", "'NO_SUCH_HOOK' is not set"),
        ([3], "a value of type int"),
    ],
)
def test_what_is_no_address_is_refused_without_being_shown(given: Any, shown: str) -> None:
    with refuses(ConfigurationError, shown) as caught:
        Trainer(notify=given, accelerator="cpu", devices=1)
    assert SECRET not in str(caught.value)


def test_an_address_may_be_in_a_variable(tmp_path: Path, hooks: HookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_HOOK", hooks.url)
    trainer = silent_trainer(default_root_dir=tmp_path, logger="csv", max_epochs=1, notify="env:MY_HOOK")
    trainer.fit(Regressor(), loader(16))
    assert hooks.events == ["end"]
    assert json.loads((trainer.run_dir / "config.json").read_text())["trainer"]["notify"] == "env:MY_HOOK"
