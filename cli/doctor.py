"""``phalanx doctor``: checks of this machine, one line each."""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pathlib import Path

from ..framework.core.errors import ConfigurationError
from ..framework.system.provenance import provenance
from .commands import CHECK_FAILED
from .host_checks import check_hosts, parse_hosts
from .machine_checks import check_gpu_health, check_limits, check_network, check_ranks, check_software, check_storage
from .terminal_text import painted, say_fitted, say_json, say_wrapped
from .torch_checks import check_deepspeed, check_gpus, time_reduction


def examine(given: argparse.Namespace) -> int:
    """Print the checks of this machine; return the exit code: 69 if one has failed."""
    directory = Path(given.directory)
    if not directory.is_dir():
        raise ConfigurationError(f"{given.directory!r} is not a directory: give the one that runs will be in.")
    if given.ranks < 1:
        given.parser.error(f"--ranks {given.ranks}: give at least 1")
    if not 0 <= given.port < 1 << 16:
        given.parser.error(f"--port {given.port}: give a number up to 65535, or 0 for any free port")
    hosts = parse_hosts(given.hosts)
    checks = chain(
        check_software(),
        check_storage(directory.absolute()),
        check_limits(given.ranks),
        check_network(given.port),
        # Before anything uses CUDA here, after which no rank could be forked.
        check_ranks(time_reduction),
        check_gpus(),
        check_gpu_health(),
        check_deepspeed(given.build),
        check_hosts(hosts),
    )
    found, group = [], ""
    for check in checks:
        found.append(check)
        if not given.json:
            if check.group != group:
                group = check.group
                print(painted(group, "bold"))
            mark, color = ("ok", "green") if check.good else ("todo", "red")
            say_fitted(f"  {mark:<4} {check.name:<20} {check.found}", color, slice(2, 6))
            if not check.good:
                say_wrapped(check.advice, " " * 28)
        sys.stdout.flush()
    failed = [check for check in found if not check.good]
    # For --paste: the environment for a bug report, without secrets.
    facts = provenance() if given.paste else None
    if given.json:
        say_json({"schema": 1, "good": not failed, "checks": found, "provenance": facts})
    elif given.paste:
        say_json(facts)
    return CHECK_FAILED if failed else 0
