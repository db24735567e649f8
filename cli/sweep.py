"""``phalanx sweep``: runs a program with many values of its arguments, and finds the best ones."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from ..framework.core.errors import ConfigurationError, MetricError, PhalanxError, StorageError
from ..framework.core.wording import counted
from ..framework.report.document import build_report
from ..framework.report.finding import shown_path
from ..framework.report.page import card, facts, framed, table_of
from ..framework.report.run_files import PRUNED, RunFiles
from ..framework.report.values import span_text
from ..framework.system.atomic_files import write_text
from ..framework.system.environment import AssignedRun
from ..framework.system.file_lock import lock, unlock
from .programs import (
    Program,
    as_text,
    ending_on_request,
    given_mode,
    raise_if_asked_to_end,
    reason_of_failure,
    runs_of,
    wait_until_free,
)
from .recorded import recorded_value
from .search_space import grid, parse_search
from .sweep_study import NAME, SweepStudy
from .terminal_text import fitted_table, say, say_fitted, say_json, say_wrapped, shown_number, state_color

ROOT, IDENTITY, PAGE, OUTPUT = "phalanx_sweeps", "sweep.json", "sweep.html", "output.log"
_TRIALS = 20
# A program that fails from the start fails in all trials.
_MOST_FAILURES = 3
_STATES = {TrialState.COMPLETE: "finished", TrialState.PRUNED: PRUNED, TrialState.FAIL: "failed"}


def run_sweep(given: argparse.Namespace) -> int:
    """Run the trials that are left, and print all of them; return the exit code.

    Raises:
        ConfigurationError: the arguments are wrong, or the directory has another sweep.
        PhalanxError: the first trials have failed.
        Preempted: this process was asked to end; the same command continues the sweep.
    """
    sweep = _Sweep.of(given)
    with _locked(sweep.directory), ending_on_request("phalanx sweep"):
        sweep.keep_identity()
        study = SweepStudy(sweep.directory, sweep.space, sweep.mode, given.sampler, given.seed)
        for number in range(sweep.count):
            trial = study.begin(number)
            if not trial.state.is_finished():
                sweep.run(study, trial)
                trial = study.trials[number]
                if not given.json:
                    say_fitted(_line(sweep, trial))
            _refuse_failures(study)
        found = _document(sweep, study)
        write_text(sweep.directory / PAGE, _page(sweep, found))
    if given.json:
        say_json(found)
    else:
        _show(sweep, found)
    return 0 if found["best"] is not None else PhalanxError.exit_code


@dataclass(frozen=True)
class _Sweep:
    """The arguments of the command, checked."""

    program: Program
    space: dict[str, Any]
    metric: str
    mode: str
    value: str
    pruner: str | None
    count: int
    directory: Path
    identity: dict[str, Any]
    """The settings that identify a sweep: with other ones it is a new sweep."""

    @classmethod
    def of(cls, given: argparse.Namespace) -> _Sweep:
        space = parse_search(given.search)
        program = Program(given.target, tuple(given.arguments), given.ranks)
        program.check([*space])
        mode = given_mode(given.metric, given.mode)
        if given.trials is not None and given.trials < 1:
            raise ConfigurationError(f"--trials {given.trials} must be a whole number of at least 1.")
        count = given.trials or _TRIALS
        if given.sampler == "grid":
            size = len(grid(space))
            count = min(size, given.trials or size)
        identity = {
            "target": os.path.abspath(given.target), "arguments": [*given.arguments], "ranks": given.ranks,
            "search": {name: repr(each) for name, each in space.items()}, "metric": given.metric,
            "mode": mode, "value": given.value, "sampler": given.sampler, "prune": given.prune,
            "seed": given.seed,
        }  # fmt: skip
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
        directory = Path(given.out or Path(ROOT, f"{program.stem}-{digest}"))
        return cls(program, space, given.metric, mode, given.value, given.prune, count, directory, identity)

    def keep_identity(self) -> None:
        """Record what is swept; refuse a directory with another sweep."""
        path = self.directory / IDENTITY
        if path.exists():
            known = json.loads(path.read_bytes())
            for name, value in self.identity.items():
                if known.get(name) != value:
                    raise ConfigurationError(
                        f"{shown_path(self.directory)} holds a sweep with another {name}: {known.get(name)} there, "
                        f"{value} now. Give another --out, or the same command."
                    )
        else:
            write_text(path, json.dumps(self.identity, indent=2) + "\n")

    def run(self, study: SweepStudy, trial: FrozenTrial) -> None:
        """Run a trial to its end, from its newest checkpoint if it is under way, and record it."""
        values = dict(trial.params)
        assigned = self._assigned(study, trial)
        place = self.directory / assigned.name
        output, code = place / OUTPUT, 0
        wait_until_free(assigned)
        earlier = runs_of(assigned)
        if not any(RunFiles(run).state in ("finished", PRUNED) for run in earlier):
            continues = len(earlier) == 1 and build_report(RunFiles(earlier[0]))["resume_from"] is not None
            if not continues:
                shutil.rmtree(place, ignore_errors=True)
            assigned = self._assigned(study, trial, continues)
            code = self.program.run(values, assigned, output)
            raise_if_asked_to_end(code, "phalanx sweep")
        runs = runs_of(assigned)
        report = build_report(RunFiles(runs[-1])) if runs else {}
        seconds = report.get("total_seconds")
        facts_of_run = {"run": str(runs[-1]) if runs else None, "seconds": seconds}
        try:
            state, value = self._outcome(code, runs, report, output)
        except PhalanxError as error:
            study.end(trial, TrialState.FAIL, None, reason=str(error), **facts_of_run)
            return
        if state == TrialState.PRUNED:
            study.end(trial, state, None, reason=report["stopped"], last=value, **facts_of_run)
        else:
            study.end(trial, state, value, **facts_of_run)

    def _outcome(self, code: int, runs: list[Path], report: dict[str, Any], output: Path) -> tuple[TrialState, float]:
        if code:
            raise PhalanxError(reason_of_failure(runs[-1] if runs else None, output, code))
        if not runs:
            raise MetricError(
                f"{self.program.target} has left no run: its Trainer must write files, with a logger or checkpoints."
            )
        if len(runs) > 1:
            raise MetricError(f"{self.program.target} has trained {len(runs)} runs, and a trial is one: call fit once.")
        value = recorded_value(report, self.metric, self.mode, self.value)
        return (TrialState.PRUNED if report["state"] == PRUNED else TrialState.COMPLETE), value

    def _assigned(self, study: SweepStudy, trial: FrozenTrial, continues: bool = False) -> AssignedRun:
        pruning = None
        if self.pruner is not None:
            pruning = {
                "journal": os.path.abspath(study.journal), "study": NAME, "number": trial.number,
                "pruner": self.pruner, "monitor": self.metric,
            }  # fmt: skip
        return AssignedRun(os.path.abspath(self.directory), f"trial-{trial.number}", continues, pruning=pruning)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{directory} cannot be written ({error.strerror}): give another --out.") from None
    if lock(handle) is False:
        os.close(handle)
        raise StorageError(f"{shown_path(directory)} is in use by another sweep: wait for it, or give another --out.")
    try:
        yield
    finally:
        unlock(handle)


def _refuse_failures(study: SweepStudy) -> None:
    """Raise if the first trials have failed, all of them."""
    first = study.trials[:_MOST_FAILURES]
    if len(first) == _MOST_FAILURES and all(trial.state == TrialState.FAIL for trial in first):
        reason = str(first[0].user_attrs.get("reason")).rstrip(".")
        raise PhalanxError(
            f"The first {_MOST_FAILURES} trials have failed, and the sweep ends. The first one: {reason}. To try all "
            f"again, delete {shown_path(study.directory)}."
        )


# ---- what is shown --------------------------------------------------------------------------------------------------


def _document(sweep: _Sweep, study: SweepStudy) -> dict[str, Any]:
    """Return the trials and the best of them as JSON values."""
    trials = [_trial(sweep, each) for each in study.trials]
    ended = [each for each in trials if each["state"] == "finished"]
    order = min if sweep.mode == "min" else max
    return {
        "schema": 1,
        "directory": str(sweep.directory),
        "study": str(study.journal),
        "metric": sweep.metric,
        "mode": sweep.mode,
        "trials": trials,
        "best": order(ended, key=lambda each: each["value"]) if ended else None,
        "page": str(sweep.directory / PAGE),
    }


def _trial(sweep: _Sweep, trial: FrozenTrial) -> dict[str, Any]:
    known = trial.user_attrs
    return {
        "number": trial.number,
        "state": _STATES.get(trial.state, "running"),
        "value": trial.value if trial.state == TrialState.COMPLETE else known.get("last"),
        "seconds": known.get("seconds"),
        "parameters": dict(trial.params),
        "reason": known.get("reason"),
        "run": shown_path(Path(known["run"])) if known.get("run") else None,
        "command": sweep.program.shown_command(trial.params),
    }


def _cells(trial: dict[str, Any]) -> list[str]:
    parameters = [shown_number(value) if isinstance(value, float) else as_text(value)
                  for value in trial["parameters"].values()]  # fmt: skip
    time = "-" if trial["seconds"] is None else span_text(trial["seconds"])
    return [str(trial["number"]), trial["state"], shown_number(trial["value"]), *parameters, time]


def _line(sweep: _Sweep, trial: FrozenTrial) -> str:
    found = _trial(sweep, trial)
    number, state, value, *parameters, time = _cells(found)
    given = " ".join(f"{name}={text}" for name, text in zip(sweep.space, parameters, strict=True))
    reason = f"  {found['reason']}" if state == "failed" else ""
    return f"trial {number}  {state}  {sweep.metric} {value}  {given}  {time}{reason}"


def _show(sweep: _Sweep, found: dict[str, Any]) -> None:
    trials = sorted(found["trials"], key=lambda each: each is not found["best"])
    head = ("trial", "state", sweep.metric, *sweep.space, "time")
    fitted_table(head, [_cells(each) for each in trials], [state_color(each["state"]) for each in trials])
    failed = sum(each["state"] == "failed" for each in trials)
    if failed:
        say(f"{counted(failed, 'trial')} failed: --json has the reasons")
    if (best := found["best"]) is not None:
        say_wrapped(f"best: {sweep.metric} {shown_number(best['value'])}, {best['command']}")
    say_fitted(f"page     {shown_path(Path(found['page']))}")


def _page(sweep: _Sweep, found: dict[str, Any]) -> str:
    """Return the page of a sweep: the best trial, and a table of all."""
    best = found["best"]
    head = ("trial", "state", "value", *sweep.space, "time", "run")
    lines = [[*_cells(each), each["run"] or each["reason"] or ""] for each in found["trials"]]
    shown = [("metric", f"{sweep.metric}, {sweep.mode}")]
    if best is not None:
        shown += [("best", shown_number(best["value"])), ("command", best["command"])]
    title = f"sweep of {sweep.program.target}"
    return framed(title, card(title, facts(shown)) + card("Trials", table_of(head, lines)))
