"""``phalanx selftest`` and ``phalanx demo``, run on this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from command_terminal import Terminal, command, shown_lines, warm_command

from phalanx.cli import selftest
from phalanx.cli.main import main
from phalanx.cli.selftest_model import train_by_hand
from phalanx.framework.core.errors import RankError


def test_strategies_train_as_plain_torch_does(tmp_path: Path) -> None:
    done = warm_command("selftest", "--json", "--only", "single", "--only", "ddp", "--only", "fsdp", cwd=tmp_path)
    found = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert (done.returncode, found["good"], found["device"]) == (0, True, "cpu")
    outcomes = {each["strategy"]: (each["state"], each["ranks"]) for each in found["strategies"]}
    assert outcomes == {"single": ("ok", 1), "ddp": ("ok", 2), "fsdp": ("ok", 2)}
    assert all(each["difference"] <= 1e-4 for each in found["strategies"])


@pytest.mark.parametrize(
    ("scale", "state", "code"),
    [(1.0, "ok", 0), (1.01, "differs", 69), (float("nan"), "differs", 69), (0, "failed", 69)],
)
def test_a_strategy_that_differs_or_fails(
    scale: float, state: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launched(function: Callable[..., Any], args: Sequence[Any], num_ranks: int, uses_cuda: bool) -> list[float]:
        losses = [1.0, 0.5]
        if function is train_by_hand:
            return losses
        if not scale:
            raise RankError("rank 1 failed\nValueError: planted")
        return [losses[0], losses[1] * scale]

    monkeypatch.setattr(selftest, "launch_function", launched)
    assert main(["selftest", "--only", "ddp"]) == code
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split()[:2] == ["ddp", state]
    assert f"{int(not code)} of 1 strategies train as plain torch does on cpu" in shown[-1]
    assert ("planted" in "".join(shown)) == (state == "failed")


def test_a_strategy_that_cannot_be_used_is_skipped_with_the_reason(tmp_path: Path) -> None:
    without_ops = {"CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    done = warm_command("selftest", "--only", "zero2-offload", cwd=tmp_path, env=without_ops)
    assert done.returncode == 0
    assert re.search(r"^zero2-offload +skipped +-", done.stdout, re.MULTILINE)
    assert re.search(r"^ ?zero2-offload: .*no-such-compiler", done.stdout, re.MULTILINE)


def test_an_unknown_strategy_is_answered_in_one_line(tmp_path: Path) -> None:
    done = command("selftest", "--only", "fspd", cwd=tmp_path)
    assert (done.returncode, len(done.stdout.splitlines())) == (78, 1)
    assert "Did you mean 'fsdp'?" in done.stdout


def test_the_demo_trains_on_two_ranks_and_ends_with_its_report(tmp_path: Path) -> None:
    shown = Terminal(["demo", "--strategy", "ddp", "--devices", "2"], tmp_path).end(seconds=120.0)
    lines = shown_lines(shown)
    assert (tmp_path / "phalanx_logs/version_0/report.html").is_file()
    assert any("report.html" in line for line in lines[-12:])
    assert any("ddp, 2 ranks" in line for line in lines)
    found = json.loads((tmp_path / "phalanx_logs/version_0/report.json").read_text())
    assert (found["state"], found["epochs"]) == ("finished", 5)
    # Guessing each of 256 bytes alike has a loss of 5.5.
    assert min(found["curves"]["train/loss"]["value"]) < 3.0


def test_the_demo_answers_what_is_wrong(tmp_path: Path) -> None:
    done = warm_command("demo", "--strategy", "dpd", cwd=tmp_path)
    assert (done.returncode, len(done.stdout.splitlines())) == (78, 1)
    assert "Did you mean 'ddp'?" in done.stdout
