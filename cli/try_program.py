"""``phalanx try``: runs a program within a budget of time, and compares it with earlier runs of the same program."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ..framework.core.errors import ConfigurationError, MetricError, PhalanxError
from ..framework.core.intervals import seconds_of
from ..framework.report.document import build_report
from ..framework.report.finding import find_run, find_runs, shown_path
from ..framework.report.noise import judge
from ..framework.report.run_files import RunFiles
from ..framework.report.values import as_number, mapping, span_text, text, whole
from ..framework.system.atomic_files import write_text
from ..framework.system.environment import AssignedRun
from ..framework.system.provenance import code_digest, git_commit, has_changes
from .programs import Program, ending_on_request, given_mode, raise_if_asked_to_end, reason_of_failure, runs_of
from .recorded import recorded_value
from .terminal_text import fitted_table, say, say_json, say_wrapped, shown_number

ROOT, RECORD = "phalanx_tries", "try.json"
FINISHED, CUT, FAILED = "finished", "budget", "failed"
FIRST = "first"


@dataclass(frozen=True)
class _Group:
    """Runs of one configuration with different seeds."""

    paths: list[str]
    values: dict[int, float]
    commit: str | None

    @property
    def value(self) -> float:
        """The mean of the values."""
        return fmean(self.values.values())


@dataclass(frozen=True)
class _Trial:
    """The arguments of the command, checked."""

    program: Program
    metric: str
    mode: str
    which: str
    budget: float
    num_seeds: int

    @classmethod
    def of(cls, given: argparse.Namespace) -> _Trial:
        program = Program(given.target, tuple(given.arguments), given.ranks)
        program.check()
        if given.seeds < 1:
            raise ConfigurationError(f"--seeds {given.seeds} must be a whole number of at least 1.")
        mode = given_mode(given.metric, given.mode)
        seconds = seconds_of(given.budget)
        if not seconds:
            raise ConfigurationError(f"--budget {given.budget!r} must be a time above 0, such as 90s, 5m or 2h.")
        return cls(program, given.metric, mode, given.value, seconds, given.seeds)

    @property
    def configuration(self) -> dict[str, Any]:
        """The settings that runs of one configuration share. Their seeds may differ."""
        target = Path(self.program.target)
        return {
            "target": str(target.absolute()), "code": code_digest(target), "arguments": [*self.program.arguments],
            "ranks": self.program.ranks, "budget_seconds": self.budget,
        }  # fmt: skip


def try_program(given: argparse.Namespace) -> int:
    """Run a program once for each seed, and print what it reached; return the exit code.

    Raises:
        ConfigurationError: the arguments are wrong, or there is no such earlier run.
        Preempted: this process was asked to end.
    """
    trial = _Trial.of(given)
    against = None if given.against is None else find_run(given.against)
    configuration = trial.configuration
    earlier = _best(_groups(trial, configuration, against), trial.mode)
    if against is not None and earlier is None:
        raise ConfigurationError(
            f"--against {given.against}: the run has no value of {trial.metric}: give another one."
        )
    folder = Path(trial.program.target).absolute().parent
    code = {"commit": git_commit(folder), "dirty": has_changes(folder)}
    with ending_on_request("phalanx try"):
        runs = [_run(trial, configuration, number) for number in range(trial.num_seeds)]
    found = _document(trial, code, runs, earlier)
    if given.json:
        say_json(found)
    else:
        _show(found)
    return PhalanxError.exit_code if found["status"] == FAILED else 0


def _run(trial: _Trial, configuration: dict[str, Any], number: int) -> dict[str, Any]:
    """Run the program with one seed, and return what it reached as JSON values."""
    program = trial.program
    assigned = AssignedRun(os.path.abspath(ROOT), program.stem, repeat=number)
    before = {*runs_of(assigned)}
    output = Path(ROOT, program.stem, "output.log")
    output.unlink(missing_ok=True)
    began = time.monotonic()
    code = program.run({}, assigned, output, trial.budget)
    seconds = time.monotonic() - began
    is_cut = seconds >= trial.budget
    if not is_cut:
        raise_if_asked_to_end(code, "phalanx try")
    runs = [run for run in runs_of(assigned) if run not in before]
    report = build_report(RunFiles(runs[-1])) if runs else {}
    for run in runs:
        write_text(run / RECORD, json.dumps({**configuration, "repeat": number}) + "\n")
    measured = mapping(mapping(report.get("memory")).get("measured"))
    found: dict[str, Any] = {
        "run": None if not runs else shown_path(runs[-1]),
        "seed": _seed(runs[-1]) if runs else None,
        "status": CUT if is_cut else FAILED if code else FINISHED,
        "why": None,
        "value": None,
        "seconds": round(seconds, 3),
        "steps": report.get("optimizer_steps"),
        "peak_memory_bytes": whole(measured.get("device_peak_bytes")) or whole(measured.get("host_peak_bytes")),
    }
    if found["status"] == FAILED:
        found["why"] = reason_of_failure(runs[-1] if runs else None, output, code)
        return found
    try:
        if not runs:
            raise MetricError(
                f"{program.target} has left no run: its Trainer must write files, with a logger or checkpoints."
            )
        found["value"] = recorded_value(report, trial.metric, trial.mode, trial.which)
    except PhalanxError as error:
        found["why"] = str(error)
        found["status"] = FAILED if found["status"] == FINISHED else CUT
    return found


def _seed(run: Path) -> int | None:
    return whole(mapping(RunFiles(run).config.get("resolved")).get("seed"))


# ---- earlier runs ---------------------------------------------------------------------------------------------------


def _groups(trial: _Trial, configuration: dict[str, Any], against: Path | None) -> Iterator[_Group]:
    """Yield the earlier runs of the program by their configuration; with ``against``, only those like that run.

    By default runs of another budget are left out, and others that took longer than the budget.
    """
    found: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    wanted = None if against is None else _key(against, _record(against))
    candidates = find_runs(Path())
    if against is not None and not any(path.samefile(against) for path in candidates):
        candidates.append(against)
    for path in candidates:
        record = _record(path)
        key = _key(path, record)
        if wanted is not None:
            if key != wanted:
                continue
        elif not _is_of(path, record, configuration):
            continue
        report = build_report(RunFiles(path))
        if (
            wanted is None
            and not record
            and not (report["state"] == "finished" and (as_number(report["total_seconds"]) or 0.0) <= trial.budget)
        ):
            continue
        found.setdefault(key, []).append((path, report))
    for runs in found.values():
        values: dict[int, float] = {}
        paths: list[str] = []
        for path, report in runs:
            try:
                value = recorded_value(report, trial.metric, trial.mode, trial.which)
            except MetricError:
                continue
            # The newest run comes first.
            if values.setdefault(_seed(path) or 0, value) is value:
                paths.append(shown_path(path))
        if values:
            yield _Group(paths, values, text(runs[0][1].get("git_commit")) or None)


def _best(groups: Iterator[_Group], mode: str) -> _Group | None:
    order = min if mode == "min" else max
    return order(groups, key=lambda group: group.value, default=None)


def _record(run: Path) -> dict[str, Any]:
    try:
        return mapping(json.loads((run / RECORD).read_bytes()))
    except (OSError, ValueError):
        return {}


def _key(run: Path, record: dict[str, Any]) -> str:
    """Return a text that is the same for runs of one configuration; that of a run with unknown changes is its own."""
    if record:
        return json.dumps({name: value for name, value in record.items() if name != "repeat"}, sort_keys=True)
    config = RunFiles(run).config
    if config.get("git_commit") is None or config.get("git_dirty") is not False:
        return str(run.absolute())
    return json.dumps([config.get(name) for name in ("git_commit", "command", "directory")])


def _is_of(run: Path, record: dict[str, Any], configuration: dict[str, Any]) -> bool:
    """Whether an earlier run is one of the program, with the same budget."""
    if record:
        return all(record.get(name) == configuration[name] for name in ("target", "budget_seconds"))
    config = RunFiles(run).config
    try:
        words = shlex.split(text(config.get("command")))
    except ValueError:
        return False
    folder = text(config.get("directory"))
    return any(os.path.normpath(os.path.join(folder, word)) == configuration["target"] for word in words)


# ---- what is shown --------------------------------------------------------------------------------------------------


def _document(
    trial: _Trial, code: dict[str, Any], runs: list[dict[str, Any]], earlier: _Group | None
) -> dict[str, Any]:
    statuses = [run["status"] for run in runs]
    status = next(each for each in (FAILED, CUT, FINISHED) if each in statuses)
    values = {
        (number if run["seed"] is None else run["seed"]): run["value"]
        for number, run in enumerate(runs)
        if run["value"] is not None
    }
    verdict: dict[str, Any] = {"verdict": None, "difference": None, "noise": None, "because": "no run has a value"}
    if values and status != FAILED:
        if earlier is None:
            verdict |= {"verdict": FIRST, "because": "there is no earlier run to compare with"}
        else:
            found = judge(values, earlier.values, trial.mode)
            verdict = {
                "verdict": found.verdict, "difference": found.difference, "noise": found.noise,
                "because": found.sentence,
            }  # fmt: skip
    elif values:
        verdict["because"] = "a run has failed"
    return {
        "schema": 1,
        "program": trial.program.target,
        "command": trial.program.shown_command({}),
        **code,
        "metric": trial.metric,
        "mode": trial.mode,
        "value": fmean(values.values()) if values else None,
        "seconds": round(sum(run["seconds"] for run in runs), 3),
        "steps": max((run["steps"] or 0 for run in runs), default=None),
        "peak_memory_bytes": max(run["peak_memory_bytes"] or 0 for run in runs) or None,
        "status": status,
        "why": next((run["why"] for run in runs if run["why"]), None),
        **verdict,
        "against": None if earlier is None else {
            "value": earlier.value, "commit": earlier.commit, "runs": earlier.paths,
        },
        "runs": runs,
    }  # fmt: skip


def _show(found: dict[str, Any]) -> None:
    lines = [
        [
            text(run["run"]) or "-",
            run["status"],
            shown_number(run["value"]),
            "-" if run["seed"] is None else str(run["seed"]),
            "-" if run["steps"] is None else f"{run['steps']:,}",
            span_text(run["seconds"]),
        ]
        for run in found["runs"]
    ]
    fitted_table(("run", "status", found["metric"], "seed", "step", "time"), lines)
    if found["why"]:
        say_wrapped(found["why"])
    earlier = found["against"]
    noise = "" if found["noise"] is None else f", noise {shown_number(found['noise'])}"
    if earlier is not None:
        say(f"earlier  {shown_number(earlier['value'])}, of {', '.join(earlier['runs'])}")
    if found["difference"] is not None:
        say(f"change   {found['difference']:+.4g}{noise}")
    say_wrapped(f"verdict  {found['verdict'] or 'none'}: {found['because']}", indent="")
