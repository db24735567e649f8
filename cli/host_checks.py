"""Checks of other hosts for ``phalanx doctor``, over ssh: whether they answer, their clocks and their versions."""

from __future__ import annotations

import json
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata

from ..framework.core.errors import ConfigurationError
from ..framework.launch.node_records import clock_seconds
from .machine_checks import Check, ToolError, output_of

_PACKAGES = ("torch", "phalanx", "deepspeed")
_CONNECT_SECONDS, _ANSWER_SECONDS = 5, 30.0
_MOST_AT_ONCE = 32
_PROGRAM = f"""
import json, platform, time
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
found = {{name: version(name) for name in {_PACKAGES!r}}}
print(json.dumps({{"time": time.time(), "versions": {{"python": platform.python_version(), **found}}}}))
"""


@dataclass(frozen=True)
class Answer:
    """The answer of a host, or the reason why there is none."""

    versions: dict[str, str | None] | None = None
    """Of Python and the packages that matter; None without an answer."""
    seconds: float = 0.0
    """The duration of the connection and of the program."""
    offset: float = 0.0
    """Seconds by which the host's clock is ahead of this one; exact to half of ``seconds``."""
    reason: str = ""


def parse_hosts(text: str) -> list[str]:
    """Return the hosts of a list that is separated by commas.

    Raises:
        ConfigurationError: a name is empty, or would be an option of ssh.
    """
    hosts = [host.strip() for host in text.split(",")] if text else []
    for host in hosts:
        if not host or host.startswith("-") or any(char.isspace() for char in host):
            raise ConfigurationError(f"--hosts {text!r}: {host!r} is not the name of a host; give names such as a,b.")
    return hosts


def check_hosts(hosts: Sequence[str]) -> Iterator[Check]:
    """Check that hosts can be reached without a password, that their clocks agree, and their versions."""
    if not hosts:
        return
    own = {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}
    with ThreadPoolExecutor(min(len(hosts), _MOST_AT_ONCE)) as pool:
        for host, answer in zip(hosts, pool.map(_ask, hosts), strict=True):
            yield from _checks(host, answer, own)


def _checks(host: str, answer: Answer, own: dict[str, str | None]) -> Iterator[Check]:
    if answer.versions is None:
        yield Check("hosts", host, False, answer.reason, f"make this work without a password: ssh {host} true")
        return
    yield Check("hosts", host, True, f"answers in {answer.seconds:.1f} s")
    # The part that the delay of the answer cannot explain.
    least_offset = abs(answer.offset) - answer.seconds / 2
    direction = "ahead" if answer.offset > 0 else "behind"
    clock = (
        f"{abs(answer.offset):.1f} s {direction}" if least_offset > 0 else f"equal within {answer.seconds / 2:.1f} s"
    )
    most = clock_seconds()
    advice = f"synchronize it to within {most:g} s, as chrony does"
    yield Check("hosts", f"{host} clock", least_offset <= most, clock, advice)
    theirs = answer.versions
    differing = [f"{name} {theirs.get(name)} and {mine} here" for name, mine in own.items() if theirs.get(name) != mine]
    shown = "; ".join(differing) or ", ".join(f"{name} {mine}" for name, mine in own.items() if mine)
    yield Check("hosts", f"{host} versions", not differing, shown, "install the same versions on all hosts")


def _ask(host: str) -> Answer:
    """Run a program on a host, by the interpreter of this process if the host has it, else by ``python3``."""
    python = shlex.quote(sys.executable)
    shell = f"P={python}; [ -x $P ] || P=python3; exec $P -c {shlex.quote(_PROGRAM)}"
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}"]
    began = time.time()
    try:
        # The host may print a greeting above the answer, and ssh warnings above its error.
        found = json.loads(output_of(["ssh", *options, host, shell], _ANSWER_SECONDS).strip().splitlines()[-1])
        offset = float(found["time"]) - (began + time.time()) / 2
        versions = dict(found["versions"])
    except ToolError as error:
        return Answer(reason=str(error).splitlines()[-1])
    except (ValueError, IndexError, KeyError) as error:
        return Answer(reason=f"no usable answer: {type(error).__name__}: {error}")
    return Answer(versions, time.time() - began, offset)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
