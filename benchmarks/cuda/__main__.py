"""phalanx on one GPU beside plain torch, Lightning, its Fabric, ignite, Accelerate and DeepSpeed driven by hand.

Each side has a process of its own. The sides of a group take turns on the device, a fit each, so that they can be
compared. Results of one run compare with each other, not with those of another run or machine.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..sides import missing
from .child import Child, ChildError
from .device import Device
from .results import Record, Results, difference

_START_SECONDS, _FIT_SECONDS = 90.0, 120.0


@dataclass(frozen=True)
class Side:
    """A way to train: the side of ``benchmarks.sides``, its strategy, and the one that it is compared with."""

    name: str
    strategy: str
    reference: str
    options: dict[str, Any] = field(default_factory=dict)


_SINGLE = ("raw", "phalanx", "phalanx Fabric", "Fabric", "ignite", "Accelerate", "Lightning")
SIDES = {
    **{name: Side(name, "single", "raw") for name in _SINGLE},
    **{
        f"{name} {strategy}": Side(name, strategy, f"raw {strategy}")
        for strategy in ("ddp", "fsdp")
        for name in ("raw", "phalanx")
    },
}
# Settings of DeepSpeed, each beside the defaults of phalanx.
_SETTINGS: dict[str, dict[str, Any]] = {
    "overlap_comm": {"zero_optimization": {"overlap_comm": True}},
    "bf16 communication": {"communication_data_type": "bf16"},
}
ZERO = {
    "raw": SIDES["raw"],
    **{
        f"{name} zero{stage}": Side(name, f"zero{stage}", f"DeepSpeed zero{stage}")
        for stage in (1, 2, 3)
        for name in ("DeepSpeed", "phalanx")
    },
    **{
        f"phalanx zero{stage}, {title}": Side("phalanx", f"zero{stage}", f"phalanx zero{stage}", options)
        for stage in (2, 3)
        for title, options in _SETTINGS.items()
    },
}


@dataclass(frozen=True)
class Group:
    """Sides that take turns with a model: how many rounds of how many steps."""

    size: str
    sides: dict[str, Side]
    rounds: int = 3
    steps: int = 20
    compiled: bool = False


GROUPS: dict[str, Group | str] = {
    "data": "inputs",
    "small": Group("small", SIDES, 5, 200),
    "350m": Group("350m", SIDES),
    "350m-compiled": Group("350m", SIDES, compiled=True),
    "saves": "saves",
    "zero": Group("350m", ZERO),
    "1.3b": Group("1.3b", SIDES),
    "1.3b-compiled": Group("1.3b", SIDES, compiled=True),
}


class Run:
    """One call of the benchmark: measures groups until its time is over."""

    def __init__(self, chosen: argparse.Namespace, folder: Path) -> None:
        self._chosen, self._folder = chosen, folder
        self._began = time.monotonic()
        self.results = Results(chosen.device == "cuda" and not (chosen.tiny or chosen.quick))

    def note(self, line: str) -> None:
        """Print a line with the time."""
        print(f"{time.monotonic() - self._began:6.1f} s {line}", flush=True)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return float(self._chosen.seconds) - (time.monotonic() - self._began)

    def measure(self, name: str) -> None:
        """Measure a group, as far as the time allows."""
        group = GROUPS[name]
        if self.left <= 0:
            self.results.problems.append(f"{name}: no time was left")
        elif isinstance(group, Group):
            self.note(name)
            self._sides(name, group)
        else:
            self.note(name)
            self._process(name, group)

    def _child(self, module: str, name: str, given: dict[str, Any]) -> Child:
        folder = self._folder / name.replace(" ", "-")
        folder.mkdir()
        common = {name: getattr(self._chosen, name) for name in ("device", "tiny", "quick")}
        # Several processes compile at once, so each does so in few processes of its own.
        variables = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        given = common | given | {"folder": str(folder)}
        return Child(f"{__package__}.{module}", given, folder / "log.txt", variables)

    def _process(self, name: str, module: str) -> None:
        """Take all results of a process, and report why some are missing."""
        found: dict[str, dict[str, Any]] = {}
        child = self._child(module, name, {})
        try:
            while (message := child.answer(min(_FIT_SECONDS, self.left))) is not None:
                found[f"{message.get('title')} {message.get('way')} {message.get('gigabytes')}"] = message
        except ChildError as error:
            self.results.problems.append(f"{name}: {error}")
        finally:
            child.end()
        (self.results.inputs if module == "inputs" else self.results.saves).extend(found.values())

    def _sides(self, name: str, group: Group) -> None:
        """Measure the sides of a group in turn; one that fails is reported, and the others are measured."""
        chosen = {title: side for title, side in group.sides.items() if title in (self._chosen.side or group.sides)}
        references = {side.reference for side in chosen.values()} | {"raw"}
        size = "tiny" if self._chosen.tiny else group.size
        records, children = dict[str, Record](), dict[str, Child]()

        def attempt(title: str, action: Callable[[], None]) -> None:
            try:
                if self.left <= 0:
                    raise ChildError("no time was left")
                action()
            except ChildError as error:
                records[title].problem = str(error)
                self.note(f"  {title} is left out: {error}")
                if title in children:
                    children.pop(title).end()

        def start(title: str, side: Side) -> None:
            if library := missing(side.name):
                raise ChildError(f"{library} is not installed")
            job = {"model": size, "strategy": side.strategy, "options": side.options, "compiled": group.compiled}
            children[title] = self._child("fits", f"{name} {title}", {"side": side.name, "job": job})

        def ready(title: str) -> None:
            children[title].answer(min(_START_SECONDS, self.left))

        def fit(title: str, what: str, steps: int) -> None:
            records[title].take(children[title].ask(f"{what} {steps}", min(_FIT_SECONDS, self.left)))
            if what == "check" and (reason := difference(records["raw"].losses, records[title].losses)):
                raise ChildError(reason)

        for title, side in group.sides.items():
            if title in chosen or title in references:
                records[title] = Record(name, title, side.reference, size)
                attempt(title, lambda title=title, side=side: start(title, side))  # type: ignore[misc]
        self.results.records += records.values()
        rounds, steps = (1, min(group.steps, 5)) if self._chosen.quick else (group.rounds, group.steps)
        try:
            for title in list(children):
                attempt(title, lambda title=title: ready(title))  # type: ignore[misc]
            for what in ("check", *["round"] * rounds, "probe"):
                for title in list(children):
                    attempt(title, lambda title=title, what=what: fit(title, what, steps))  # type: ignore[misc]
                self.note(f"  {what}: {len(children)} sides")
        finally:
            for child in children.values():
                child.end()


def main() -> int:
    """Measure, write the results, and return 1 if a bar was measured and is not kept to."""
    chosen = _arguments()
    # The processes of the sides are ended in any case.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    chosen.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        run = Run(chosen, Path(folder))
        run.results.machine = Device(chosen.device).describe(chosen.tiny)
        torch.cuda.empty_cache()
        for name in chosen.only or GROUPS:
            run.measure(name)
            # After each group, so that an interrupted run keeps them.
            (chosen.out / "results.json").write_text(json.dumps(run.results.as_json(), indent=1) + "\n")
            (chosen.out / "results.md").write_text(run.results.markdown())
    print(run.results.markdown())
    return 1 if any(bar.passes is False for bar in run.results.bars()) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__)
    parser.add_argument("--only", action="append", choices=GROUPS, help="measure only this group; may be repeated")
    parser.add_argument("--side", action="append", choices=SIDES | ZERO, help="measure only this side; may be repeated")
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
