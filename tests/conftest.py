"""What holds for every test: it leaves the process, the machine and the generators as it found them."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

# Threads of one operation wait for one another in busy loops, which the processes of other tests pay for: torch reads
# this when it is imported, and scripts inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch.distributed as dist
from cuda_machine import EMULATED
from messages import Messages
from ranks import changed_variables, close_pools, lasting_threads, pool_pids, preload, seed_alike, variables_for
from tiers import Tiers, needs_compiled_ops

# The folder of multiprocessing goes when the process does; that of torch's compiler also comes with its profiler.
_CUDA_TESTS = Path(__file__).parent / "cuda"
_MANY_TESTS = 500
# What many tests import in their processes.
_LIBRARIES = (
    *("datasets", "deepspeed", "jsonargparse", "peft", "sklearn.datasets", "torchmetrics", "transformers"),
    "webdataset",
)
_IGNORED_FILES = ("pymp-", "torchinductor_")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of ``tiers`` and ``messages``."""
    tiers = ("quick", "rest", "all")
    parser.addoption("--tier", choices=tiers, default="all", help="which tests to run: see tests/tiers.py")
    parser.addoption("--write-durations", action="store_true", help="write how long the slow functions take")
    parser.addoption("--left-out", metavar="FILE", help="where to write what the tier leaves out")
    parser.addoption("--write-messages", action="store_true", help="write tests/messages.txt: see tests/messages.py")


def pytest_configure(config: pytest.Config) -> None:
    """Run the tier that was asked for, and look after the messages of errors."""
    config.pluginmanager.register(Tiers(config))
    config.pluginmanager.register(Messages(config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests that only ``make cuda`` runs."""
    return (collection_path.is_relative_to(_CUDA_TESTS) and not _is_cuda_run(config)) or None


def _is_cuda_run(config: pytest.Config) -> bool:
    return config.pluginmanager.hasplugin("cuda_plugin")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests with a parameter that names NVMe, so that `-m "not nvme"` leaves them out as well.

    CUDA cannot be emulated in a build of torch that has it; some of these tests ``make cuda`` runs on real devices.
    """
    is_skipped = not EMULATED and not _is_cuda_run(config)
    for item in items:
        if is_skipped and _is_emulated(item):
            item.add_marker(pytest.mark.skip(reason="this build of torch has CUDA itself"))
        given = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        if any(isinstance(value, str) and "zero3-nvme" in value for value in given):
            item.add_marker(pytest.mark.nvme)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import once what many tests import in each of their processes."""
    # What was imported stays: a test that collects garbage need not search it.
    gc.collect()
    gc.freeze()
    if len(session.items) > _MANY_TESTS:
        preload(_LIBRARIES)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Compile what a test needs before its time limit begins, which a compiler could exceed on a busy machine."""
    if EMULATED and _is_emulated(item):
        variables_for("cuda")
    if needs_compiled_ops(item.nodeid):
        _build_ops()
    return (yield)


def _is_emulated(item: pytest.Item) -> bool:
    return item.path.parent.name == "emulated_cuda"


@cache
def _build_ops() -> None:
    """Build DeepSpeed's Adam for the CPU, or wait for the process that does. A test says what is wrong with it."""
    subprocess.run([sys.executable, "-m", "phalanx.strategies.deepspeed.ops", "cpu_adam"], check=False)


@pytest.fixture(scope="session", autouse=True)
def _private_temp_dir() -> Iterator[None]:
    """Give the session a temporary directory of its own, so that what is left there was left by a test."""
    outside = tempfile.gettempdir()
    # pytest keeps the directories of tests for whoever looks into a failure.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", outside)
    tempfile.tempdir = tempfile.mkdtemp(prefix="phalanx-tests-")
    os.environ["TMPDIR"] = tempfile.tempdir
    cache = os.environ["PHALANX_CACHE"] = tempfile.mkdtemp(prefix="phalanx-cache-", dir=outside)
    yield
    close_pools()
    for made in (tempfile.tempdir, cache):
        shutil.rmtree(made, ignore_errors=True)
    del os.environ["PHALANX_CACHE"]
    tempfile.tempdir = outside
    os.environ["TMPDIR"] = outside


@pytest.fixture(scope="module", autouse=True)
def _imported_once() -> None:
    """Keep what the files before have imported from being searched each time that a test collects garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(_private_temp_dir: None) -> Iterator[None]:
    """Seed before a test, and fail one that leaves something behind."""
    seed_alike()
    directory = Path.cwd()
    threads = set(threading.enumerate())
    children = _children()
    variables = dict(os.environ)
    files = set(os.listdir(tempfile.gettempdir()))
    yield
    os.chdir(directory)
    left: dict[str, Sequence[object]] = {
        "threads": lasting_threads(threads) if set(threading.enumerate()) - threads else [],
        "child processes": _lasting_children(children),
        "environment variables": _put_back(variables),
        "temporary files": _lasting_files(files),
        "process groups": _groups(),
    }
    told = "; ".join(f"{what} {sorted(map(str, items))}" for what, items in left.items() if items)
    assert not told, f"the test left behind: {told}"


def _children() -> set[int]:
    """Return the pids of this process's children; empty where the system does not tell."""
    pids: set[int] = set()
    for task in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else []:
        with contextlib.suppress(OSError):
            pids.update(int(pid) for pid in Path(f"/proc/self/task/{task}/children").read_text().split())
    return pids


def _lasting_children(known: set[int], seconds: float = 2.0) -> list[int]:
    until = time.monotonic() + seconds
    while left := [pid for pid in _children() - known - pool_pids() if _is_alive(pid) and not _is_tracker(pid)]:
        # The workers of a loader end with its iterator, which may sit in a reference circle.
        gc.collect()
        if time.monotonic() >= until:
            break
        time.sleep(0.01)
    return left


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _is_tracker(pid: int) -> bool:
    """Whether it is the process in which Python keeps account of shared memory: one for the whole session."""
    with contextlib.suppress(OSError):
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _put_back(variables: dict[str, str]) -> list[str]:
    changed = changed_variables(variables)
    for name in changed:
        if name in variables:
            os.environ[name] = variables[name]
        else:
            del os.environ[name]
    return changed


def _lasting_files(known: set[str]) -> list[str]:
    left = [name for name in os.listdir(tempfile.gettempdir()) if name not in known]
    return [name for name in left if not name.startswith(_IGNORED_FILES)]


def _groups() -> list[str]:
    """Name torch's default group if a test left one, and destroy it: a test after it would take it for its own."""
    if not dist.is_initialized():
        return []
    dist.destroy_process_group()
    return ["torch.distributed's default group"]


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lightning's own classes, where it is installed."""
    # It sets this when it looks for devices.
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    module = pytest.importorskip("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return module
