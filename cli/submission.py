"""``write_job`` and ``submit_job``: the file of a job, and the tool that submits it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ..framework.core.errors import ConfigurationError, PhalanxError, StorageError
from .job import Job
from .kubernetes_manifest import kubernetes_manifest
from .ray_job import ray_job
from .slurm_script import slurm_script
from .terminal_text import say, say_json


@dataclass(frozen=True)
class Platform:
    """A platform that runs jobs: the content of its file, and the command that submits the file."""

    text: Callable[[Job], str]
    ending: str
    command: Callable[[str], list[str]]


PLATFORMS = {
    "slurm": Platform(slurm_script, "sbatch", lambda file: ["sbatch", file]),
    # The working directory is copied to the cluster, the file with it.
    "ray": Platform(
        ray_job,
        "ray.py",
        lambda file: ["ray", "job", "submit", "--no-wait", "--working-dir", ".", "--", "python", file],
    ),
    "kubernetes": Platform(kubernetes_manifest, "yaml", lambda file: ["kubectl", "create", "-f", file]),
}


def write_job(job: Job, platform: str, output: str | None, as_json: bool) -> int:
    """Write a job to a file, or to standard output; return the exit code. ``as_json``: describe it in JSON instead.

    Raises:
        ConfigurationError: the file exists.
        StorageError: it cannot be written.
    """
    chosen = PLATFORMS[platform]
    text = chosen.text(job)
    if output is not None:
        _write(output, text)
    if as_json:
        _say_json(job, platform, output, text)
    elif output is None:
        sys.stdout.write(text)
    else:
        say(f"{output} is written. To submit it: {shlex.join(chosen.command(output))}")
    return 0


def submit_job(job: Job, platform: str, output: str | None, as_json: bool) -> int:
    """Write a job to a file, by default one in the working directory, and submit it; return the exit code.

    The tool's answer is printed, or with ``as_json`` a part of the JSON that describes the job.

    Raises:
        ConfigurationError: the platform's tool is missing, or the file exists.
        StorageError: the file cannot be written.
        PhalanxError: the tool has failed.
    """
    chosen = PLATFORMS[platform]
    file = output or f"{job.name}.{chosen.ending}"
    command = chosen.command(file)
    tool = shutil.which(command[0])
    if tool is None:
        raise ConfigurationError(
            f"--submit needs {command[0]}, which is not on PATH: write the job with -o FILE, and submit it from a host "
            "that has it."
        )
    if platform == "ray" and os.path.relpath(file).startswith(os.pardir):
        raise ConfigurationError(f"--output {file!r} must be below the working directory, which Ray copies.")
    text = chosen.text(job)
    _write(file, text)
    output_to = subprocess.PIPE if as_json else None
    done = subprocess.run([tool, *command[1:]], stdin=subprocess.DEVNULL, stdout=output_to, text=True, check=False)
    if done.returncode != 0:
        raise PhalanxError(f"{command[0]} has failed with exit code {done.returncode}; the job is in {file}.")
    if as_json:
        _say_json(job, platform, file, text, done.stdout)
    return 0


def _say_json(job: Job, platform: str, file: str | None, text: str, answer: str | None = None) -> None:
    command = None if file is None else PLATFORMS[platform].command(file)
    described = {"schema": 1, "platform": platform, "name": job.name, "file": file, "text": text}
    say_json({**described, "submit": command, "submitted": answer is not None, "answer": answer})


def _write(file: str, text: str) -> None:
    try:
        with open(file, "x", encoding="utf-8") as handle:
            handle.write(text)
    except FileExistsError:
        raise ConfigurationError(f"{file!r} exists: remove it, or give another name with -o FILE.") from None
    except OSError as error:
        raise StorageError(f"{file!r} cannot be written: {error.strerror}.") from None
