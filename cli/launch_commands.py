"""Arguments of ``launch``. The module of the command is imported when the command runs."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from . import run_or_write
from .command_parser import add_command

PLATFORMS = ("slurm", "ray", "kubernetes")
# Each option and its help on one line of 80 columns.
_OPTIONS_WIDTH = 28


def add_commands(commands: Any) -> None:
    """Add ``launch`` to the subparsers of a parser."""
    text = "run a script on several ranks, on several nodes, or as a job"
    example = "phalanx launch -n 8 --nodes 2 --node-rank 0 --rdzv host-a:29500 train.py"
    parser = add_command(commands, "launch", run_or_write, text, example, has_json=False)
    parser.usage = "phalanx launch [options] SCRIPT ..."
    parser.formatter_class = partial(argparse.RawDescriptionHelpFormatter, max_help_position=_OPTIONS_WIDTH)
    add = parser.add_argument
    add("-n", "--devices", type=int, metavar="N", help="ranks on each node (default: its GPUs, or 1)")
    add("--max-restarts", type=int, default=0, metavar="N", help="restarts of failed ranks (default: 0)")
    add("--nodes", type=int, default=1, metavar="N", help="nodes; run the command on each (default: 1)")
    add("--node-rank", type=int, metavar="K", help="number of this node, from 0")
    add("--rdzv", metavar="HOST:PORT", help="node 0 and a free port there, for several nodes")
    add("--on", choices=PLATFORMS, metavar="PLATFORM", help="write a job for slurm, ray or kubernetes")
    add("-o", "--output", metavar="FILE", help="where to write the job (default: printed)")
    add("--submit", action="store_true", help="submit the job with sbatch, ray or kubectl")
    add("--name", metavar="NAME", help="name of the job (default: that of the script)")
    add("--image", metavar="IMAGE", help="container image, for kubernetes")
    add("--cpu", action="store_true", help="request no GPUs for the job")
    add("--json", action="store_true", help="describe the job in JSON")
    add("script", metavar="SCRIPT", help="its arguments follow; the Trainer takes all ranks")
    # Not required, as an error about a missing script would name it otherwise.
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS).required = False
