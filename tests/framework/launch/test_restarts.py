"""Ranks that fail are started again from the newest good checkpoint, for as long as that may change how they end."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from launches import Attempts
from ranks import TESTS, run_on_ranks, run_script
from restart_run import train
from small_fits import Tiny, loader, quiet_trainer

from phalanx.callbacks import ModelCheckpoint
from phalanx.framework.launch.restart_policy import FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, RestartPolicy

SCRIPT = TESTS / "restart_run.py"


def run(root: Path, strategy: str, ranks: int, moments: str, *snapshots: str) -> tuple[int, list[str]]:
    root.mkdir(exist_ok=True)
    done = run_script(SCRIPT, str(root), strategy, str(ranks), moments, *snapshots, timeout=150.0)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.timeout(240)
def test_a_restarted_run_equals_an_undisturbed_one(tmp_path: Path) -> None:
    ended, _ = run_on_ranks(2, train, tmp_path / "whole", "ddp", 2, [])
    # The first failure is before anything was saved, beside the checkpoints of another run of the same name.
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    code, printed = run(tmp_path / "broken", "ddp", 2, "raise-0,kill-5")
    assert code == 0, printed
    assert ended in printed
    starts = [line for line in printed if line.startswith("phalanx: the ranks are started again")]
    assert [line.rpartition("restart ")[2] for line in starts] == ["1 of 3)", "2 of 3)"]
    assert any(line.startswith("rank 1 (pid ") and "failed at step 0 (epoch 0" in line for line in printed)
    assert any(line.endswith("was killed by SIGKILL at step 5 (epoch 0, batch 5)") for line in printed)


@pytest.mark.timeout(240)
def test_one_rank_is_restarted_until_a_step_fails_twice_in_a_row(tmp_path: Path) -> None:
    code, printed = run(tmp_path, "single", 1, "raise-9*")
    assert code == 1
    assert printed[-2] == "ZeroDivisionError: raise-9"
    # The newest snapshot is of the last step or of one before.
    newest = r"1 step is lost: epoch=0-step=8.ckpt \(step 8\)|nothing lost: rescued.ckpt \(step 9\)"
    assert re.match(rf"phalanx: ({newest}) is good. To resume: python ", printed[-1])
    assert "phalanx: the ranks are not started again, since optimizer step 9 failed twice in a row" in printed
    assert sum("are started again" in line for line in printed) == 1


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2)])
def test_after_a_failure_the_newest_snapshot_is_a_checkpoint(tmp_path: Path, strategy: str, ranks: int) -> None:
    _, whole = run(tmp_path / "whole", strategy, ranks, "none")
    code, printed = run(tmp_path / "broken", strategy, ranks, "raise-5", "2")
    assert code == 1
    (saved,) = (tmp_path / "broken").rglob("*.ckpt")
    assert saved.name == "rescued.ckpt"
    assert f"phalanx: the newest snapshot in memory was saved as {saved}" in printed
    assert "rescued.ckpt (step 4) is good" in printed[-1]
    code, printed = run(tmp_path / "broken", strategy, ranks, "raise-5", "2")
    assert code == 0
    assert [line for line in printed if line.startswith("ENDED ")] == [
        line for line in whole if line.startswith("ENDED")
    ]


def test_the_wait_grows_until_an_attempt_gets_further() -> None:
    restarts = RestartPolicy(10)
    assert restarts.wait_before_restart(137, 5) == 0.0
    assert restarts.wait_before_restart(1, 3) == FIRST_WAIT_SECONDS
    assert restarts.wait_before_restart(1, None) == 2 * FIRST_WAIT_SECONDS
    assert restarts.wait_before_restart(74, 4) == 0.0
    assert restarts.wait_before_restart(76, 9) == 0.0
    many = RestartPolicy(100)
    waits = [many.wait_before_restart(137, step) for step in range(40, 0, -1)]
    assert waits[-1] == LONGEST_WAIT_SECONDS


@pytest.mark.parametrize("code", [0, 65, 75, 78, 130])
def test_exit_codes_that_a_restart_would_not_change_are_final(code: int) -> None:
    restarts = RestartPolicy(3)
    assert restarts.wait_before_restart(code, 4) is None
    assert restarts.refusal == ""


def test_restarts_are_limited_and_end_with_a_start_that_fails_twice() -> None:
    used_up = RestartPolicy(1)
    assert used_up.wait_before_restart(1, 3) is not None
    assert used_up.wait_before_restart(1, 8) is None
    assert "max_restarts=1 are used up" in used_up.refusal
    starting = RestartPolicy(9)
    assert starting.wait_before_restart(137, None) is not None
    assert starting.wait_before_restart(137, None) is None
    assert "their start failed twice in a row" in starting.refusal
    assert RestartPolicy(0).wait_before_restart(1, 3) is None


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempts:
    return Attempts(tmp_path / "launch", monkeypatch)


def fit(root: Path, steps: int, given: str | None = None, saver: ModelCheckpoint | None = None) -> tuple[int, int, str]:
    """Fit up to a number of steps; return how many were computed, the run's version and where it came from."""
    saver = saver or ModelCheckpoint(every_n_train_steps=1, save_last=True)
    computed: list[int] = []

    class Counting(Tiny):
        def on_train_batch_end(self, *_: object) -> None:
            computed.append(1)

    origin: list[str] = []
    trainer = quiet_trainer(root, saver, max_steps=steps)

    class Origin(Counting):
        def on_train_start(self) -> None:
            assert trainer.run is not None
            origin.append(str(trainer.run.resumed.checkpoint if trainer.run.resumed else ""))

    trainer.fit(Origin(), loader(), ckpt_path=given)
    return len(computed), trainer.directory.version, origin[0]


def test_each_fit_of_a_script_continues_the_same_fit_of_the_last_attempt(tmp_path: Path, ranks: Attempts) -> None:
    """And not in the newest directory, which belongs to the script's other fit, nor in that of an older run."""
    fit(tmp_path, 4)
    ranks.begin()
    assert fit(tmp_path, 2)[:2] == (2, 1)
    assert fit(tmp_path, 3)[:2] == (3, 2)
    ranks.begin()
    computed, version, origin = fit(tmp_path, 4)
    assert (computed, version) == (2, 1)
    assert origin.startswith(str(tmp_path / "phalanx_logs" / "version_1"))
    assert fit(tmp_path, 4)[:2] == (1, 2)
    # A third attempt follows the second.
    ranks.begin()
    assert fit(tmp_path, 4)[:2] == (0, 1)


def test_a_checkpoint_that_was_being_replaced_is_restored(tmp_path: Path, ranks: Attempts) -> None:
    ranks.begin()
    fit(tmp_path, 2, saver=ModelCheckpoint(save_top_k=0, save_last=True, every_n_train_steps=1))
    (last,) = (tmp_path / "phalanx_logs" / "version_0").rglob("last.ckpt")
    last.rename(last.with_name(".last.ckpt.0123456789abcdef.old"))
    ranks.begin()
    assert fit(tmp_path, 3) == (1, 0, str(last))


def test_ckpt_path_holds_until_a_checkpoint_was_saved(tmp_path: Path, ranks: Attempts) -> None:
    fit(tmp_path, 2)
    (first,) = (tmp_path / "phalanx_logs" / "version_0").rglob("last.ckpt")
    ranks.begin()
    fit(tmp_path, 3, str(first))
    shutil.rmtree(tmp_path / "phalanx_logs" / "version_1")
    ranks.begin()
    computed, version, origin = fit(tmp_path, 4, str(first))
    assert (computed, origin) == (2, str(first))
    assert version == 1


def test_in_a_folder_of_many_runs_only_own_checkpoints_are_resumed_from(tmp_path: Path, ranks: Attempts) -> None:
    def saver(step: int) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "kept", filename="{step}", every_n_train_steps=step, save_top_k=-1)

    fit(tmp_path, 4, saver=saver(1))
    for path in (tmp_path / "kept").iterdir():
        path.rename(path.with_name(f"older-{path.name}"))
    ranks.begin()
    fit(tmp_path, 3, saver=saver(2))
    ranks.begin()
    computed, _, origin = fit(tmp_path, 4, saver=saver(2))
    assert (computed, os.path.basename(origin)) == (2, "step=2.ckpt")
