"""Runs of ``stream_run.py`` that are killed once and resumed, and the samples that they have seen."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path

from ranks import TESTS, run_script


def killed_and_resumed(
    root: Path,
    kind: str,
    kill: int,
    first: tuple[int, int],
    second: tuple[int, int],
    *,
    env: Mapping[str, str] | None = None,
    libraries: tuple[str, ...] = (),
) -> tuple[list[int], list[int], str]:
    """Run a training that is killed, and again to its end.

    Args:
        root: the folder of the runs and of the shards.
        kind: the stream, as ``stream_run.py`` takes it.
        kill: the optimizer step that the kill interrupts.
        first: the ranks, and the workers of each, of the run that is killed.
        second: those of the run that resumes it.
        env: environment variables of both.
        libraries: modules that they find imported.

    Returns:
        The samples of the first run up to its last checkpoint, those of the second, and its output.
    """

    def run(ranks: int, workers: int) -> tuple[int, str]:
        arguments = [str(root), kind, *map(str, (ranks, workers, kill))]
        script = TESTS / "stream_run.py"
        ended = run_script(script, *arguments, env=env, libraries=libraries, timeout=120.0)
        return ended.returncode, ended.stdout

    code, output = run(*first)
    assert code in (-signal.SIGKILL, 128 + signal.SIGKILL, 1), output
    code, output = run(*second)
    assert code == 0, output
    # A checkpoint is complete after every second step, also if the kill is in the step after it.
    return *_seen(root, kill // 2 * 2), output


def _seen(root: Path, resumed_at: int) -> tuple[list[int], list[int]]:
    """Return the samples of the steps before ``resumed_at`` in the first run, and of all steps of the second."""
    before: list[int] = []
    after: list[int] = []
    for path in sorted(root.glob("seen-*.txt")):
        for line in path.read_text().splitlines():
            is_second, step, own = json.loads(line)
            if is_second:
                assert step >= resumed_at
                after += own
            elif step < resumed_at:
                # The killed rank may write the line of its last step, or not.
                before += own
    return before, after
