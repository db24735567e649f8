"""Checks of a machine for ``phalanx doctor``: software, disks, limits, ranks and GPUs. Each returns its findings."""

from __future__ import annotations

import os
import re
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ..framework.core.errors import PhalanxError
from ..framework.core.size_text import size_text

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 16)
_PROBE_BYTES = 32 << 20
_LEAST_FREE_BYTES = 5 << 30
# A loader's workers pass batches through it: a container's default of 64 MB is used up by a few large ones.
_LEAST_SHARED_BYTES = 1 << 30
_FILES_OF_A_RANK = 64
_SLOW_BYTES_PER_SECOND = 20e6


@dataclass(frozen=True)
class Check:
    """One finding: what was checked, what was found, and what to do unless it is good."""

    group: str
    name: str
    good: bool
    found: str
    advice: str = ""


class ToolError(Exception):
    """A tool has failed, or does not answer. The message is what it has printed, or else the reason."""


def output_of(command: Sequence[str], limit_seconds: float) -> str:
    """Run a tool without input; return what it prints.

    Raises:
        ToolError: it cannot be run, fails, or takes longer.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit_seconds,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ToolError(f"no answer within {limit_seconds:g} s") from None
    except OSError as error:
        raise ToolError(f"{command[0]} cannot be run: {error.strerror or error}") from error
    if done.returncode:
        printed = done.stderr.strip() or done.stdout.strip()
        raise ToolError(printed or f"{command[0]} ended with exit code {done.returncode}")
    return done.stdout


def check_software(version: Callable[[str], str] = metadata.version) -> Iterator[Check]:
    """Check the versions of Python and torch, and show those of optional packages and of the libraries of loggers."""
    python = sys.version_info
    yield Check("software", "python", (3, 10) <= python[:2] <= (3, 13), ".".join(map(str, python[:3])),
                "use Python 3.10 to 3.13")  # fmt: skip
    try:
        torch = version("torch")
    except metadata.PackageNotFoundError:
        yield Check("software", "torch", False, "not installed", "pip install -c constraints.txt torch")
        return
    release = tuple(int(part) for part in re.findall(r"\d+", torch)[:2])
    known = OLDEST_TORCH <= release < NEWEST_TORCH
    yield Check("software", "torch", known, torch, "install a version of constraints.txt, 2.11 to 2.15")
    optional = {"software": ("deepspeed", "torchao"), "loggers": ("tensorboard", "wandb", "mlflow", "trackio")}
    for group, packages in optional.items():
        for package in packages:
            try:
                found = version(package)
            except metadata.PackageNotFoundError:
                found = "not installed (optional)"
            yield Check(group, package, True, found)


def check_storage(
    directory: Path, free: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
) -> Iterator[Check]:
    """Check a directory for checkpoints: room, the speed of a durable write, and whether a rename is one step."""
    room = free(directory)
    yield Check("storage", "room", room >= _LEAST_FREE_BYTES, f"{size_text(room)} free in {directory}",
                "make room, or give another default_root_dir")  # fmt: skip
    probe = directory / f".phalanx-doctor-{secrets.token_hex(4)}"
    try:
        began = time.monotonic()
        with open(probe, "wb") as file:
            file.write(bytes(min(_PROBE_BYTES, max(1, room // 4))))
            file.flush()
            os.fsync(file.fileno())
            written = os.fstat(file.fileno()).st_size
        speed = written / max(1e-6, time.monotonic() - began)
        moved = probe.with_name(f"{probe.name}.moved")
        moved.touch()
        os.replace(probe, moved)
        moved.unlink()
    except OSError as error:
        probe.unlink(missing_ok=True)
        yield Check("storage", "write", False, f"{directory}: {error.strerror or error}",
                    "give another default_root_dir, or make it writable")  # fmt: skip
        return
    yield Check("storage", "write", speed >= _SLOW_BYTES_PER_SECOND, f"{size_text(int(speed))}/s, written and synced",
                "checkpoints will take long: use a faster disk, or save asynchronously")  # fmt: skip
    yield Check("storage", "rename", True, "replaces a file in one step")


def check_limits(num_ranks: int, shared: Path = Path("/dev/shm"), size: int | None = None) -> Iterator[Check]:
    """Check shared memory, and the limit of open files for a number of ranks."""
    if shared.is_dir() or size is not None:
        held = shutil.disk_usage(shared).total if size is None else size
        yield Check("limits", str(shared), held >= _LEAST_SHARED_BYTES, size_text(held),
                    "loaders with workers need more: docker run --shm-size=8g")  # fmt: skip
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_OF_A_RANK * (num_ranks + 1)
    enough = resource.RLIM_INFINITY in (soft, hard) or hard >= needed
    yield Check("limits", "open files", enough, f"{soft} (at most {hard}), {needed} for {num_ranks} ranks",
                f"raise the limit: ulimit -Hn {needed}")  # fmt: skip


def check_network(port: int = 0) -> Iterator[Check]:
    """Check that this host has an address of its own, and that a port of it can be used."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        yield Check("network", "host name", True, f"{name} is {address}")
    except OSError:
        yield Check("network", "host name", False, f"{name} has no address",
                    f"ranks on several hosts need it: add {name} to /etc/hosts, or set MASTER_ADDR")  # fmt: skip
    try:
        # On all interfaces, as the first rank listens.
        with socket.create_server(("", port)) as server:
            found = f"port {server.getsockname()[1]} is free"
        yield Check("network", "port", True, found)
    except OSError as error:
        yield Check("network", "port", False, f"port {port}: {os.strerror(error.errno or 0)}",
                    "another process uses it: end that process, or set MASTER_PORT")  # fmt: skip


def check_ranks(reduce: Callable[[], float]) -> Iterator[Check]:
    """Check that two ranks on the CPU find one another; ``reduce`` returns the seconds of their all-reduce."""
    try:
        seconds = reduce()
    except (PhalanxError, OSError) as error:
        yield Check("ranks", "two CPU ranks", False, str(error).splitlines()[0], "see docs/failures.md")
        return
    yield Check("ranks", "two CPU ranks", True, f"an all-reduce of 4 MB takes {seconds * 1e3:.1f} ms")


# ---- NVIDIA GPUs, of which only the tool of the driver knows memory errors and slow clocks --------------------------

_GPU_FIELDS = ("index", "driver_version", "temperature.gpu", "ecc.errors.uncorrected.volatile.total")
# The name of a last field, and the one that it had before version 535 of the driver.
_CLOCK_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
# Bits of that field that name a fault. The other bits, such as an idle GPU or its power limit, are normal.
_SLOW = {0x08: "hardware slowdown", 0x20: "software thermal limit", 0x40: "too hot", 0x80: "power brake"}
_DRIVER_SECONDS = 20.0


def check_gpu_health() -> Iterator[Check]:
    """Check each GPU for memory errors that were not corrected, and for clocks held down by heat or power."""
    if shutil.which("nvidia-smi") is None:
        return
    try:
        rows = _gpu_rows()
    except ToolError as error:
        found = str(error).splitlines()[0]
        yield Check("GPUs", "nvidia-smi", False, found, "the driver does not answer: reload it, or reboot")
        return
    for index, driver, temperature, errors, clocks in rows:
        # Cards without error correction report no number.
        count = int(errors) if errors.isdecimal() else 0
        found = f"driver {driver}, {f'{errors} uncorrected' if errors.isdecimal() else 'no ECC'}"
        yield Check("GPUs", f"memory {index}", not count, found, "reset the GPU; if errors return, have it replaced")
        active = int(clocks, 16) if clocks.startswith("0x") else 0
        slow = [text for bit, text in _SLOW.items() if active & bit]
        found = f"{temperature} C, {', '.join(slow) or 'not slowed down'}"
        yield Check("GPUs", f"clocks {index}", not slow, found, "improve its cooling and power supply")


def _gpu_rows() -> list[list[str]]:
    """Return the fields of each GPU.

    Raises:
        ToolError: nvidia-smi fails, or does not answer.
    """
    new, old = (
        ["nvidia-smi", f"--query-gpu={','.join((*_GPU_FIELDS, field))}", "--format=csv,noheader,nounits"]
        for field in _CLOCK_FIELDS
    )
    try:
        printed = output_of(new, _DRIVER_SECONDS)
    except ToolError as error:
        if "not a valid field" not in str(error):
            raise
        printed = output_of(old, _DRIVER_SECONDS)
    rows = ([cell.strip() for cell in line.split(",")] for line in printed.splitlines())
    return [row for row in rows if len(row) == len(_GPU_FIELDS) + 1]
