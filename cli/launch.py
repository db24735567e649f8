"""``phalanx launch``: runs a script on the ranks of this node, or writes the job that does so on a platform."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..framework.core.errors import ConfigurationError
from ..framework.launch.launch_context import NodeOptions
from ..framework.system.environment import environment_node, import_without_warnings
from .command_parser import imported
from .job import Job, job_name
from .submission import submit_job, write_job
from .user_program import require_file

_FOR_JOBS = ("output", "submit", "name", "image", "cpu", "json")


def run_or_write(given: argparse.Namespace) -> int:
    """Run a script on several ranks, or write and submit a job; return the exit code.

    Raises:
        ConfigurationError: the arguments are wrong.
        SystemExit: the ranks have ended; with their exit code.
    """
    _check_numbers(given)
    least, most = _node_range(given.nodes)
    if given.on is None:
        for name in _FOR_JOBS:
            if getattr(given, name):
                raise ConfigurationError(f"--{name} is for a job: give --on slurm, ray or kubernetes as well.")
        _check_script(given.script)
        nodes = _nodes(given, least, most)
        if nodes is not None:
            # Before anything else imports it: its C++ code would print a stack for each lost connection.
            import_without_warnings("torch")
        launch_ranks = imported("rank_launch:launch_ranks")
        code: int = launch_ranks(given.script, given.arguments, given.devices, given.max_restarts, nodes)
        return code
    if least < most or given.spares:
        raise ConfigurationError(
            "--nodes MIN:MAX and --spares are for launches without --on: a job has a fixed number of nodes, and is "
            "started again as a whole. Give --nodes N."
        )
    job = _job(given, most)
    finish = submit_job if given.submit else write_job
    return finish(job, given.on, given.output, given.json)


def _check_numbers(given: argparse.Namespace) -> None:
    for option, value, least in (
        ("--devices", given.devices, 1),
        ("--spares", given.spares, 0),
        ("--max-restarts", given.max_restarts, 0),
        ("--node-rank", given.node_rank, 0),
    ):
        if value is not None and value < least:
            raise ConfigurationError(f"{option} {value} must be a whole number of at least {least}.")


def _check_script(script: str) -> None:
    if os.path.isdir(script) and not os.path.isfile(os.path.join(script, "__main__.py")):
        raise ConfigurationError(f"{script!r} is a directory: give a script, such as {script.rstrip('/')}/train.py.")
    if not os.path.isdir(script):
        require_file(script, "script")


def _node_range(given: str) -> tuple[int, int]:
    """Return the least and the largest number of nodes."""
    least, _, most = given.partition(":")
    if not (least.isdecimal() and (most or least).isdecimal() and 1 <= int(least) <= int(most or least)):
        raise ConfigurationError(f"--nodes {given} must be a whole number of at least 1, or two of them such as 2:4.")
    return int(least), int(most or least)


def _nodes(given: argparse.Namespace, least: int, most: int) -> NodeOptions | None:
    """Return the place of this node among several; None for a single one."""
    total = most + given.spares
    if total == 1:
        if given.rdzv is not None or given.node_rank:
            raise ConfigurationError("--rdzv and --node-rank are for several nodes: give --nodes as well.")
        return None
    number, rdzv = given.node_rank, given.rdzv
    if number is None or rdzv is None:
        node, master, at = environment_node(total)
        number = node if number is None else number
        rdzv = f"{master}:{at}" if rdzv is None and master is not None and at is not None else rdzv
    words = f"--nodes {given.nodes}" + (f" --spares {given.spares}" if given.spares else "")
    if number is None or rdzv is None:
        missing = "--rdzv HOST:PORT" if rdzv is None else "--node-rank K"
        raise ConfigurationError(
            f"{words} needs {missing}: run the command on each node, with --node-rank 0 to {total - 1} and the same "
            "--rdzv, a port of node 0; or with srun --ntasks-per-node=1."
        )
    if number >= total:
        raise ConfigurationError(f"--node-rank {number} of {words} must be below {total}.")
    host, _, port = rdzv.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigurationError(f"--rdzv {rdzv!r} must be of the form HOST:PORT, such as host-a:29500.")
    return NodeOptions(number, least, most, given.spares, host.strip("[]"), int(port))


def _job(given: argparse.Namespace, nodes: int) -> Job:
    if given.node_rank is not None or given.rdzv is not None:
        raise ConfigurationError(f"--node-rank and --rdzv have no place in a job: {given.on} assigns both.")
    if given.devices is None:
        raise ConfigurationError(f"--on {given.on} needs -n, the number of ranks on each node.")
    if (given.image is None) == (given.on == "kubernetes"):
        say = "needs --image, a container image with the script" if given.image is None else "takes no --image"
        raise ConfigurationError(f"--on {given.on} {say}.")
    if given.on != "kubernetes":
        _check_script(given.script)
    return Job(
        name=job_name(given.name or Path(given.script).stem),
        script=given.script,
        arguments=tuple(given.arguments),
        nodes=nodes,
        devices=given.devices,
        max_restarts=given.max_restarts,
        gpus=0 if given.cpu else given.devices,
        image=given.image or "",
        directory=os.getcwd(),
    )
