"""Tiers of tests: ``make test`` runs those that are quick and some of the slow ones, ``make check`` runs all.

``durations.json`` lists the functions of which a case takes longer than ``SLOW_SECONDS``, with the seconds of a case;
``make durations`` writes it. In the quick tier, slow functions run one case each while their time is left, in an order
and with a case that a hash of the commit chooses: commit after commit, all of them come round. The tier ``rest`` holds
what the quick one leaves out.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean, median

import pytest

SLOW_SECONDS = 0.7
# How long the slow functions of the quick tier take, added up over its processes.
SAMPLE_SECONDS = 240.0
# From here on, a function in the wrong tier is named at the end of a run. It does not fail the run, as machines differ.
WRONG_SECONDS = 10.0
DURATIONS = Path(__file__).parent / "durations.json"


def function_of(nodeid: str) -> str:
    """Return the function of a case, as ``durations.json`` names it."""
    return nodeid.partition("[")[0].removeprefix("tests/")


def needs_compiled_ops(nodeid: str) -> bool:
    """Whether a case runs what DeepSpeed compiles: ZeRO with offloading."""
    return "offload" in nodeid or "nvme" in nodeid


def read_durations() -> dict[str, float]:
    """Return the seconds that a case of each slow function takes."""
    return {name: float(seconds) for name, seconds in json.loads(DURATIONS.read_text(encoding="utf-8")).items()}


def sample(cases: Mapping[str, list[str]], seconds: Mapping[str, float], commit: str, most: float) -> set[str]:
    """Choose cases of slow functions for one commit.

    Args:
        cases: the cases of each slow function.
        seconds: the time of one case of each function.
        most: the time of all that are chosen.
    """

    def rank(text: str) -> int:
        return int(hashlib.sha256(f"{commit} {text}".encode()).hexdigest(), 16)

    chosen, left = set(), most
    for function in sorted(cases, key=rank):
        if seconds[function] <= left:
            left -= seconds[function]
            chosen.add(min(cases[function], key=rank))
    return chosen


def misplaced(taken: Mapping[str, Iterable[float]], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the functions that take too long for the quick tier, with their seconds on an idle machine."""
    means = {function: mean(times) for function, times in taken.items()}
    known = [means[function] / seconds[function] for function in means if function in seconds]
    # A machine that takes longer for what was measured before takes longer for everything.
    slowness = max(1.0, median(known)) if known else 1.0
    times = {function: taken / slowness for function, taken in means.items() if function not in seconds}
    return {function: each for function, each in times.items() if each > WRONG_SECONDS}


def commit_of(folder: Path) -> str:
    """Return the commit that is checked out; empty without git."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _needs_nvme(item: pytest.Item) -> bool:
    # What reads and writes the disk takes minutes to compile.
    return item.get_closest_marker("nvme") is not None


class Tiers:
    """The plugin that leaves out cases, and looks after the tier of each function."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tier = config.getoption("--tier")
        self._writes = config.getoption("--write-durations")
        self._is_worker = hasattr(config, "workerinput")
        self._slow = read_durations()
        self._taken: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._wrong: dict[str, float] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what the tier leaves out, and begin with the files that take longest.

        So no process is left alone with one at the end. The tests of a file stay together, as they share fixtures.
        """
        if self._tier != "all":
            cases: dict[str, list[str]] = defaultdict(list)
            for item in items:
                if (function := function_of(item.nodeid)) in self._slow and not _needs_nvme(item):
                    cases[function].append(item.nodeid)
            chosen = sample(cases, self._slow, commit_of(self._config.rootpath), SAMPLE_SECONDS)
            rest = {item for item in items if item.nodeid not in chosen and (self._is_slow(item) or _needs_nvme(item))}
            is_left = rest if self._tier == "quick" else set(items) - rest
            left = [item for item in items if item in is_left]
            self._config.hook.pytest_deselected(items=left)
            if self._tier == "quick":
                self._note_left_out(left)
            items[:] = [item for item in items if item not in is_left]
        seconds: dict[Path, float] = defaultdict(float)
        late: dict[Path, bool] = defaultdict(bool)
        for item in items:
            seconds[item.path] += self._slow.get(function_of(item.nodeid), 0.0)
            # On a new machine the compiler runs beside the other tests.
            late[item.path] |= needs_compiled_ops(item.nodeid) or "emulated_cuda" in item.nodeid
        items.sort(key=lambda item: (late[item.path], -seconds[item.path], str(item.path)))

    def _is_slow(self, item: pytest.Item) -> bool:
        return function_of(item.nodeid) in self._slow

    def _note_left_out(self, left: list[pytest.Item]) -> None:
        file = self._config.getoption("--left-out")
        if file and left:
            functions = {function_of(item.nodeid) for item in left}
            minutes = sum(self._slow.get(function_of(item.nodeid), 0.0) for item in left) / 2 / 60
            text = f"Left out: {len(left)} cases of {len(functions)} slow functions. Run them all: make check"
            Path(file).write_text(f"{text} ({minutes:.0f} more minutes on two cores)\n", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up what each case takes."""
        if not self._is_worker and not report.skipped:
            self._taken[function_of(report.nodeid)][report.nodeid] += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Write the durations, or find the functions that are in the wrong tier."""
        if self._is_worker or self._config.option.collectonly:
            return
        taken = {function: list(cases.values()) for function, cases in self._taken.items()}
        if self._writes:
            slow = {name: round(mean(times), 1) for name, times in sorted(taken.items()) if mean(times) > SLOW_SECONDS}
            DURATIONS.write_text(json.dumps(slow, indent=0) + "\n", encoding="utf-8")
            return
        self._wrong = misplaced(taken, self._slow)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name the functions that are in the wrong tier."""
        for function, seconds in self._wrong.items():
            terminalreporter.write_line(
                f"{function}: {seconds:.1f} s a case, but it is not in {DURATIONS.name}: make it quicker than "
                f"{SLOW_SECONDS} s, or run `make durations`.",
                yellow=True,
            )
