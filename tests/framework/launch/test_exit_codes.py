"""The exit code and the message of a script that an error of phalanx ends, whichever part raised it."""

from __future__ import annotations

import signal
import sys

import pytest
from ranks import run_script

from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.launch import exit_hooks

FIRST_ERRORS = {
    "Fabric(strategy='fdsp')": (78, "UnknownNameError: strategy='fdsp' is not known."),
    "TrainModule.load_from_checkpoint('nowhere.ckpt')": (65, "CheckpointError: checkpoint 'nowhere.ckpt' does not"),
    "Trainer(precison=1)": (78, "UnknownArgumentError: Trainer(precison=1)"),
    "raise KeyError('mine')": (1, "KeyError: 'mine'"),
}


@pytest.mark.parametrize("call", FIRST_ERRORS)
def test_the_first_error_of_a_script_gives_its_exit_code(call: str) -> None:
    code, message = FIRST_ERRORS[call]
    done = run_script(f"from phalanx import Fabric, Trainer, TrainModule\n{call}")
    assert done.returncode == code
    # Python 3.13 marks the expression in a line of its own.
    head, place, line, last = [line for line in done.stdout.splitlines() if line.strip(" ~^")]
    assert head == "Traceback (most recent call last):"
    assert place.endswith('script.py", line 2, in <module>')
    assert line.strip() == call
    assert message in last


def test_an_interrupt_ends_the_process_by_its_signal() -> None:
    use = "from phalanx import Trainer\nTrainer(accelerator='cpu', barebones=True)\n"
    done = run_script(f"{use}raise KeyboardInterrupt", is_new=True)
    assert done.returncode == -signal.SIGINT


# Each ending runs in a process of its own, which is forked before it.
COUNTED = """
import atexit, os
from phalanx.framework.launch.exit_hooks import quick_exit

class Counted:
    def __del__(self):
        print("collected")

held = Counted()
atexit.register(print, "exit function")
def leave():
    raise quick_exit(7)

for ending in ENDINGS:
    if (child := os.fork()) == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
exec(ending)
"""
ENDINGS = {
    # Nothing is frozen or half torn down, in which extension modules would report leaks: the process just ends.
    "leave()": ["exit function", "7"],
    "try:\n    leave()\nfinally:\n    print('finally')": ["finally", "exit function", "collected", "7"],
    "try:\n    leave()\nexcept SystemExit:\n    raise SystemExit(3)": ["exit function", "collected", "3"],
    "try:\n    leave()\nexcept SystemExit:\n    print('on')": ["on", "exit function", "collected", "0"],
}


def test_a_process_with_nothing_left_to_do_exits_at_once() -> None:
    done = run_script(f"ENDINGS = {[*ENDINGS]!r}\n{COUNTED}", is_new=True)
    assert done.stdout.splitlines() == [line for printed in ENDINGS.values() for line in printed]


def test_the_exception_hook_of_a_script_is_kept() -> None:
    own = "import sys\nsys.excepthook = own = lambda *_: print('own')\nimport phalanx\nassert sys.excepthook is own\n"
    done = run_script(own + "phalanx.Fabric(strategy='fdsp')")
    assert (done.returncode, done.stdout) == (1, "own\n")


def test_an_error_outside_of_a_script_is_shown_as_usual(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    monkeypatch.setattr(sys, "__excepthook__", lambda *error: shown.append(error))
    error = ConfigurationError("in a test runner")
    exit_hooks.end_script(type(error), error, None)
    assert shown == [(type(error), error, None)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (KeyboardInterrupt("stopped after step 3"), "[rank 1] stopped after step 3\n"),
        (KeyboardInterrupt(), "[rank 1] interrupted\n"),
        (KeyError("mine"), "[rank 1] KeyError: 'mine'\n"),
    ],
)
def test_a_rank_of_another_launcher_prints_its_error_and_of_an_interrupt_one_line(
    error: BaseException, shown: str, capfd: pytest.CaptureFixture[str]
) -> None:
    exit_hooks.report_failure(1, error)
    assert capfd.readouterr().err == shown
