"""Checks of NVIDIA GPUs for ``phalanx doctor`` that only the driver's tool can make: memory errors and slow clocks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from .machine_checks import Check, ToolError, output_of

_FIELDS = ("index", "driver_version", "temperature.gpu", "ecc.errors.uncorrected.volatile.total")
# The name of the last field, and the one that it had before version 535 of the driver.
_CLOCK_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
# Bits of the last field that name a fault. The other bits, such as an idle GPU or its power limit, are normal.
_SLOW = {0x08: "hardware slowdown", 0x20: "software thermal limit", 0x40: "too hot", 0x80: "power brake"}
_ANSWER_SECONDS = 20.0


def check_gpu_health() -> Iterator[Check]:
    """Check each GPU for memory errors that were not corrected, and for clocks held down by heat or power."""
    if shutil.which("nvidia-smi") is None:
        return
    try:
        rows = _query()
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


def _query() -> list[list[str]]:
    """Return the fields of each GPU.

    Raises:
        ToolError: nvidia-smi fails, or does not answer.
    """
    new, old = (
        ["nvidia-smi", f"--query-gpu={','.join((*_FIELDS, field))}", "--format=csv,noheader,nounits"]
        for field in _CLOCK_FIELDS
    )
    try:
        printed = output_of(new, _ANSWER_SECONDS)
    except ToolError as error:
        if "not a valid field" not in str(error):
            raise
        printed = output_of(old, _ANSWER_SECONDS)
    rows = ([cell.strip() for cell in line.split(",")] for line in printed.splitlines())
    return [row for row in rows if len(row) == len(_FIELDS) + 1]
