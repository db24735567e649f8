"""Arguments of the commands for a new project or machine. The module of a command is imported when the command runs."""

from __future__ import annotations

import argparse
from typing import Any

from . import compare_strategies, create_project, examine, print_completion, run_demo, show_plan
from .command_parser import add_command

CHECK_FAILED = 69
KINDS = {
    "classifier": "a classifier of handwritten digits",
    "lm": "a transformer on the source of Python's standard library",
    "finetune": "a backbone that is frozen at first, and trained later",
    "gan": "two networks, by manual optimization",
    "loop": "a loop of your own, on Fabric",
}
SHELLS = ("bash", "zsh", "tcsh")


def add_commands(commands: Any) -> None:
    """Add ``new``, ``demo``, ``doctor``, ``selftest``, ``plan`` and ``completion`` to the subparsers of a parser."""
    _new(commands)
    _demo(commands)
    _doctor(commands)
    _selftest(commands)
    _plan(commands)
    _completion(commands)


def _new(commands: Any) -> None:
    text = "start a project: a script, its configuration and its test"
    kinds = "\n".join(f"  {name:<12}{what}" for name, what in KINDS.items())
    parser = add_command(commands, "new", create_project, text, "phalanx new classifier my-project", f"Kinds:\n{kinds}")
    parser.add_argument("kind", metavar="KIND", choices=tuple(KINDS), help="what to start from")
    parser.add_argument("name", metavar="NAME", help="the folder to create")


def _demo(commands: Any) -> None:
    text = "train a small language model on real text, in less than a minute"
    details = "It is a small version of the project of 'phalanx new lm'."
    parser = add_command(
        commands, "demo", run_demo, text, "phalanx demo --strategy zero2 --devices 2", details, has_json=False
    )
    parser.add_argument("--strategy", default="auto", metavar="NAME", help="how to distribute the work, such as ddp")
    parser.add_argument("--devices", default="auto", metavar="N", help="ranks on this machine (default: its GPUs)")
    parser.add_argument("--out", default=".", metavar="DIR", help="where the run's directory will be (default: here)")


def _doctor(commands: Any) -> None:
    text = "check this machine: software, disk, limits, GPUs, hosts"
    details = f"The exit code is {CHECK_FAILED} if a check fails."
    parser = add_command(commands, "doctor", examine, text, "phalanx doctor runs --ranks 8 --hosts a,b", details)
    parser.add_argument("directory", metavar="DIR", nargs="?", default=".", help="where runs will be (default: here)")
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="ranks of a run on this machine (default: 8)")
    parser.add_argument("--port", type=int, default=0, metavar="P", help="check the port that MASTER_PORT will be")
    parser.add_argument("--hosts", default="", metavar="A,B", help="also check other hosts over ssh")
    parser.add_argument("--build", action="store_true", help="build DeepSpeed's ops that are missing")
    parser.add_argument("--paste", action="store_true", help="also print what belongs into a report of a defect")


def _selftest(commands: Any) -> None:
    text = "compare each strategy on two ranks with plain torch on one"
    details = f"Those that cannot run are skipped. The exit code is {CHECK_FAILED} if one differs or fails."
    parser = add_command(
        commands, "selftest", compare_strategies, text, "phalanx selftest --only fsdp --only zero3", details
    )
    only = "this strategy alone; may be repeated (default: all)"
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help=only)
    accelerator = "cpu or cuda (default: cuda if there are two devices)"
    parser.add_argument(
        "--accelerator", choices=("auto", "cpu", "cuda"), default="auto", metavar="TYPE", help=accelerator
    )


def _plan(commands: Any) -> None:
    text = "count memory and communication of a run, without training"
    details = f"A script runs up to its fit. The exit code is {CHECK_FAILED} if the run does not fit."
    example = "phalanx plan --ranks 64 --device-memory 80GB train.py --width 4096"
    parser = add_command(commands, "plan", show_plan, text, example, details)
    parser.add_argument("--ranks", type=int, metavar="N", help="plan for N ranks (default: those of the script)")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="ranks of a node (default: at most 8)")
    parser.add_argument("--device-memory", metavar="SIZE", help="memory of a GPU, such as 80GB (default: this machine)")
    parser.add_argument("--host-memory", metavar="SIZE", help="memory of a node, such as 1TB (default: this machine)")
    parser.add_argument("--strategy", metavar="NAME", help="plan this strategy (default: that of the script)")
    parser.add_argument("--parallel", metavar="DEGREES", help="ranks along each axis, such as tp=2,cp=2")
    parser.add_argument("--rehearse", action="store_true", help="run a step without data, also without --parallel")
    parser.add_argument("target", metavar="TARGET", help="a script with its arguments, or MODULE:CLASS")
    parser.add_argument("arguments", metavar="...", nargs="...", help=argparse.SUPPRESS)


def _completion(commands: Any) -> None:
    text = "print the script with which a shell completes commands"
    example = 'eval "$(phalanx completion bash)"    in ~/.bashrc'
    parser = add_command(commands, "completion", print_completion, text, example, has_json=False)
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
