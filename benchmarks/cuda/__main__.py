"""phalanx on one GPU beside plain torch, Lightning, Accelerate and DeepSpeed driven by hand.

Results of one run compare with each other, not with those of another run or machine.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from .cells import SIDES
from .cohort import Budget, Setting
from .groups import GROUPS, Run
from .report import markdown
from .results import Results, bars


def main() -> int:
    """Measure, write the results, and return 1 if a bar was measured and is not kept to."""
    chosen = _arguments()
    # The processes of the sides are ended in any case.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    chosen.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def note(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s {line}", flush=True)

    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        setting = Setting(chosen.device, chosen.tiny, chosen.quick, Path(folder), Budget(chosen.seconds), note)
        judged = chosen.device == "cuda" and not (chosen.tiny or chosen.quick)
        run = Run(setting, chosen.side or list(SIDES), Results(is_judged=judged))
        _measure(run, chosen.only or list(GROUPS), chosen.out)
    print(markdown(run.results, chosen.tiny))
    return 1 if any(bar.passes is False for bar in bars(run.results)) else 0


def _measure(run: Run, names: list[str], out: Path) -> None:
    """Run groups until the time is over, writing the results after each, so that an interrupted run keeps them."""
    run.setting.note("machine")
    run.machine()
    for name, group in GROUPS.items():
        if name in names:
            if run.setting.budget.left <= 0:
                run.results.problems.append(f"{name}: no time was left")
                continue
            run.setting.note(name)
            group(run)
            _write(run.results, run.setting, out)
    _write(run.results, run.setting, out)


def _write(results: Results, setting: Setting, out: Path) -> None:
    (out / "results.json").write_text(json.dumps(results.as_json(), indent=1) + "\n")
    (out / "results.md").write_text(markdown(results, setting.tiny))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__)
    parser.add_argument("--only", action="append", choices=GROUPS, help="measure only this group; may be repeated")
    parser.add_argument("--side", action="append", choices=SIDES, help="measure only this side; may be repeated")
    parser.add_argument("--seconds", type=float, default=480, help="the time for all groups (default: 480)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench-cuda"), help="for the results (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="one short round: whether it runs, not what it costs")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in place of each size")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu needs --tiny (default: cuda)")
    chosen = parser.parse_args()
    if chosen.device == "cpu" and not chosen.tiny:
        parser.error("--device cpu trains only the tiny model: add --tiny.")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device: add --device cpu --tiny to try the code without one.")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
