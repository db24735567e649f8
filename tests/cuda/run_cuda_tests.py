"""Run the tests on the CUDA devices of this machine, within a limit of time: ``run_cuda_tests.py [--seconds 570] ...``.

Needs no network and no installation of phalanx: wheels of missing packages are taken from a folder. With a torch that
is built without CUDA, devices are emulated, and tests of what the emulation lacks are skipped. Other arguments are
those of pytest, such as ``-k memory``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cuda_summary
import offline

ROOT = offline.ROOT
TESTS = ROOT / "tests"
MARK = "PHALANX_CUDA_RUN"
# Seconds. Emulated devices compute on the cores of the host, which are few on many machines.
LIMIT, PATIENT = 570.0, 3000.0
# The tests on emulated devices that need no recording come first; the order is that of importance.
FILES = [TESTS / "emulated_cuda" / f"test_{name}_on_devices.py" for name in ("fits", "nonfinite", "collectives")]
# Others follow by their names.
FIRST = ("strategies", "waits", "resume", "several", "processes", "ends")
# Names, the tests of each group, processes, and the part of the time that is left which it may take at most.
GROUPS = [
    ("parallel", "not alone and not deepspeed", True, 0.5),
    ("deepspeed", "deepspeed and not alone", True, 0.5),
    ("alone", "alone", False, 1.0),
]
OPS = {"cuda": ["cpu_adam", "pin_memory", "async_io"], "cpu": ["cpu_adam"]}
BUILD = """
import sys
from phalanx.strategies.deepspeed.ops import build_ops
name, device_type = sys.argv[1:]
build_ops([name], device_type)
"""
MACHINE = """
import json, platform
import torch
import cuda_machine
found = {"python": platform.python_version(), "torch": torch.__version__, "CUDA": torch.version.cuda}
found |= {"devices": cuda_machine.num_devices(), "emulated": cuda_machine.EMULATED}
print(json.dumps(found))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the groups and print the summary; return 0 if all tests that could run passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, help=f"for all of it (default: {LIMIT:.0f}, without a device {PATIENT:.0f})"
    )
    parser.add_argument("-m", dest="marks", default="", help="of these tests, those with such marks")
    parser.add_argument("--jobs", type=int, default=4, help="tests at a time (default: %(default)s)")
    parser.add_argument("--wheels", type=Path, default=offline.WHEELS, help="a folder of wheels")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "cuda", help="a folder for the results")
    given, others = parser.parse_known_args(arguments)
    began = time.monotonic()
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "pytest.log").unlink(missing_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="phalanx-cuda-"))
    try:
        with prepared(folder, given.wheels) as environment:
            return run(given, others, folder, environment, began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(given: Any, others: list[str], folder: Path, environment: dict[str, str], began: float) -> int:
    """Run all groups in an environment; return the exit code."""
    output = subprocess.check_output([sys.executable, "-c", MACHINE], env=environment, text=True, timeout=120)
    machine = json.loads(output.splitlines()[-1])
    if not machine["devices"]:
        print("This torch is built for CUDA, and sees no device: there is nothing to run.")
        return 1
    if machine["emulated"]:
        print("This torch is built without CUDA: devices are emulated.", flush=True)
    until = began + (given.seconds or (PATIENT if machine["emulated"] else LIMIT))
    builds = [] if machine["emulated"] else started_builds(environment, given.out / "ops.log")
    groups = []
    for name, marks, is_parallel, share in GROUPS:
        print(f"--- {name}", flush=True)
        limit = share * (until - time.monotonic() - 10)
        jobs = ["-n", str(given.jobs), "--dist", "load", "--maxschedchunk", "1"] if is_parallel else ["-p", "no:xdist"]
        files = [] if any("::" in each or each.endswith(".py") for each in others) else files_of_tests()
        chosen = f"({marks}) and ({given.marks})" if given.marks else marks
        options = ["-m", chosen, *jobs, f"--junitxml={given.out / f'junit-{name}.xml'}", *others, *files]
        groups.append({"name": name, **run_group(options, environment, limit, given.out / "pytest.log")})
    for build in builds:
        build.kill()
        build.wait()
    results = cuda_summary.collect(folder, machine, groups)
    (given.out / "results.json").write_text(json.dumps(results, indent=1))
    text = cuda_summary.text_of(results)
    (given.out / "summary.txt").write_text(text + "\n")
    print(text)
    return 0 if cuda_summary.is_good(results) else 1


def files_of_tests() -> list[Path]:
    """Return the files of tests, the most important ones first."""
    first = [f"test_cuda_{name}.py" for name in FIRST]
    others = [path for path in (TESTS / "cuda").glob("test_*.py") if path.name not in first]
    return [*FILES, *(TESTS / "cuda" / name for name in first), *sorted(others)]


@contextmanager
def prepared(folder: Path, wheels: Path) -> Iterator[dict[str, str]]:
    """Yield the environment in which tests find phalanx, its helpers and missing packages; end all that they start."""
    site = folder / "site"
    site.mkdir()
    offline.fill(site, wheels)
    mark = uuid.uuid4().hex
    path = offline.search_path(site, TESTS, TESTS / "cuda", TESTS / "emulated_cuda")
    environment = {**os.environ, "PYTHONPATH": path, "PHALANX_CUDA_RESULTS": str(folder), MARK: mark}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    script = "import cuda_machine, json; print(json.dumps(cuda_machine.variables()))"
    found = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True, timeout=300)
    try:
        # Of the emulation: its folder comes first on the path.
        yield {**environment, **json.loads(found.splitlines()[-1])}
    finally:
        end_all(f"{MARK}={mark}".encode())


def started_builds(environment: dict[str, str], log: Path) -> list[subprocess.Popen[bytes]]:
    """Start to compile DeepSpeed's ops, each in a process."""
    with log.open("wb") as output:
        return [
            subprocess.Popen(
                [sys.executable, "-c", BUILD, name, device_type],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for device_type, names in OPS.items()
            for name in names
        ]


def run_group(options: Sequence[Any], environment: dict[str, str], limit: float, log: Path) -> dict[str, Any]:
    """Run pytest within a limit of time; return how it ended."""
    command = [sys.executable, "-m", "pytest", "-p", "cuda_plugin", "-p", "no:cacheprovider", "--timeout", "90", "-q"]
    began, stopped = time.monotonic(), False
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, *map(str, options)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        for seconds, signum in ((limit, signal.SIGINT), (10.0, signal.SIGKILL), (10.0, None)):
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(seconds, 0.0))
                break
            stopped = True
            if signum is not None:
                process.send_signal(signum)
    tail = log.read_text(errors="replace").splitlines()[-40:]
    print(tail[-1] if tail else "", flush=True)
    seconds = time.monotonic() - began
    return {"exit code": process.returncode, "stopped": stopped, "seconds": round(seconds, 1), "tail": tail}


def end_all(mark: bytes) -> None:
    """Kill every process that has a variable of this run, in whichever session it is."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                os.kill(int(path.parent.name), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
