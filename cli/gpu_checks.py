"""Checks of NVIDIA GPUs for ``phalanx doctor`` that only the driver's tool can make: memory errors and slow clocks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

from .machine_checks import Check

_FIELDS = ("index", "driver_version", "temperature.gpu", "ecc.errors.uncorrected.volatile.total")
# Drivers before 535 have the second name alone.
_CLOCK_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
# Bits of the last field. An idle GPU and one at its usual power limit are in order.
_SLOW = {0x08: "hardware slowdown", 0x20: "software thermal limit", 0x40: "too hot", 0x80: "power brake"}
_SECONDS = 20.0


def check_driver() -> Iterator[Check]:
    """Check each GPU for memory errors that were not corrected, and for clocks held down by heat or power."""
    if shutil.which("nvidia-smi") is None:
        return
    try:
        rows = _query()
    except (OSError, subprocess.SubprocessError) as error:
        yield Check("GPUs", "nvidia-smi", False, _reason(error), "the driver does not answer: reload it, or reboot")
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


def _query() -> list[list[str]]:
    """Return the fields of each GPU.

    Raises:
        SubprocessError: the tool fails, or does not answer.
    """
    for field in _CLOCK_FIELDS:
        command = ["nvidia-smi", f"--query-gpu={','.join((*_FIELDS, field))}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        if done.returncode == 0:
            break
    done.check_returncode()
    rows = ([cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines())
    return [row for row in rows if len(row) == len(_FIELDS) + 1]


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {_SECONDS:g} s"
    printed = (getattr(error, "stderr", "") or getattr(error, "output", "") or str(error)).strip()
    return str(printed.splitlines()[0])
