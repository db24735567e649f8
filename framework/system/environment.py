"""The variables of this process's environment.

Only this module reads and sets them, besides ``fork_server_main.py``, which cannot import phalanx yet.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..core.errors import unknown
from .failure_records import RankRecords
from .launcher_env import (
    ATTEMPT,
    COMMAND,
    DIRECTORY,
    ELASTIC,
    ERROR_DIR,
    RESTARTS,
    RUN,
    STORE_FD,
    Job,
    Placement,
    read_job,
    read_node,
    read_placement,
    variables_of,
)
from .redaction import hiding

_NVME_PATH = "PHALANX_NVME_PATH"
_CACHE = "PHALANX_CACHE"
_QUIET = "PHALANX_QUIET"
_PIN_MEMORY = "PHALANX_PIN_MEMORY"
_TORCH_LOG = "TORCH_CPP_LOG_LEVEL"
_PROGRESS = "PHALANX_PROGRESS"
_PROGRESS_CHOICES = ("rich", "plain", "off")
_OVERRIDES = "PHALANX_OVERRIDES"
_ASSIGNED = "PHALANX_ASSIGNED_RUN"


@dataclass(frozen=True)
class ScriptOverrides:
    """Arguments of the Trainer of one script. Other programs that the script starts are not changed."""

    script: str
    """The absolute path of the script."""
    trainer: dict[str, Any]
    """JSON values by the name of the argument."""
    command: list[str]
    """The command that has started the script."""


@dataclass(frozen=True)
class AssignedRun:
    """The part of a program's run in a sweep or a trial: what ``phalanx sweep`` and ``phalanx try`` decide for it."""

    root: str
    """The directory in place of ``default_root_dir``, and of the one of a logger."""
    name: str
    """The name of the run's directory below it."""
    continues: bool = False
    """Whether the fit continues the run that is there from its newest checkpoint."""
    repeat: int = 0
    """The number of the repetition: above 0, ``seed_everything`` seeds with another number."""
    pruning: dict[str, Any] | None = None
    """The arguments of ``OptunaPruning.of_sweep``; None if nothing prunes the run."""


def environment_placement(num_nodes: int = 1) -> Placement:
    """Return the placement of this process among the ranks; see ``read_placement``.

    Raises:
        ConfigurationError: the variables contradict one another, or one that is needed is missing.
    """
    return read_placement(os.environ, num_nodes)


def environment_node(num_nodes: int) -> tuple[int | None, str | None, int | None]:
    """Return the number of this node, and host and port of node 0, as far as variables have them; see ``read_node``.

    Raises:
        ConfigurationError: the variables contradict one another, or a number is none.
    """
    return read_node(os.environ, num_nodes)


def current_job() -> Job | None:
    """Return the SLURM job that this process belongs to, or None."""
    return read_job(os.environ)


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for_ranks(num_ranks: int) -> int:
    """Return how many threads each of ``num_ranks`` on this machine should compute with."""
    return max(1, usable_cores() // num_ranks)


def rank_environment(
    place: Placement,
    store_fd: int | None,
    error_dir: str,
    threads: int,
    attempt: int = 0,
    may_change: bool = False,
    restarts: bool = False,
) -> dict[str, str]:
    """Return the full environment for a rank that phalanx starts on this machine.

    The user's own OMP_NUM_THREADS is retained.

    Args:
        store_fd: the listening socket that rank 0 inherits and serves the rendezvous on; None for the others, and if
            another process serves it.
        may_change: whether the next attempt may have another number of ranks.
        restarts: whether ranks that fail are started again.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    return {
        "OMP_NUM_THREADS": str(threads),
        # A rank that is killed loses no output.
        "PYTHONUNBUFFERED": "1",
        # Only rank 0 can read from the terminal: on the others breakpoint() has no effect.
        **({} if place.rank == 0 else {"PYTHONBREAKPOINT": "0"}),
        **inherited,
        **variables_of(place),
        DIRECTORY: os.getcwd(),
        ERROR_DIR: error_dir,
        ATTEMPT: str(attempt),
        COMMAND: starting_command(),
        RUN: place.run,
        STORE_FD: "" if store_fd is None else str(store_fd),
        ELASTIC: "1" if may_change else "",
        RESTARTS: "1" if restarts else "",
    }


def directory_of_start() -> str | None:
    """Return the working directory of the process that has started this rank, when it did; None in other processes."""
    return os.environ.get(DIRECTORY)


def override_script(script: str, arguments: Mapping[str, Any]) -> None:
    """Override arguments of a script's Trainer in this process, and in the ranks that it starts.

    Args:
        script: the absolute path of the script. Other programs that it starts are not changed.
        arguments: JSON values by the name of the argument.
    """
    command = [sys.executable, *sys.orig_argv[1:]]
    os.environ[_OVERRIDES] = json.dumps(asdict(ScriptOverrides(script, dict(arguments), command)))


def script_overrides() -> ScriptOverrides | None:
    """Return the overrides that ``override_script`` has set for the script of this process, or None."""
    text, file = os.environ.get(_OVERRIDES), getattr(sys.modules.get("__main__"), "__file__", None)
    if not text or file is None:
        return None
    found = ScriptOverrides(**json.loads(text))
    return found if os.path.abspath(file) == found.script else None


def assigned_run() -> AssignedRun | None:
    """Return what a sweep has decided for the run of this process, or None."""
    text = os.environ.get(_ASSIGNED)
    return AssignedRun(**json.loads(text)) if text else None


def variables_of_assigned(run: AssignedRun) -> dict[str, str]:
    """Return the variables of a new process whose run this is."""
    return {**os.environ, _ASSIGNED: json.dumps(asdict(run))}


def variables_apart() -> dict[str, str]:
    """Return the variables of a new process that is no rank, nor the run of a sweep, and imports what this one does."""
    of_rank = {*variables_of(Placement()), DIRECTORY, ERROR_DIR, ATTEMPT, COMMAND, RUN, STORE_FD, ELASTIC, RESTARTS}
    own = {*of_rank, _OVERRIDES, _ASSIGNED}
    others = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "SLURM_STEP")
    kept = {name: value for name, value in os.environ.items() if name not in own and not name.startswith(others)}
    return {**kept, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def adopt_environment(environment: dict[str, str]) -> None:
    """Replace the environment of this process: a forked rank inherits its parent's."""
    os.environ.clear()
    os.environ.update(environment)


def query_devices_by_nvml() -> None:
    """Make ``torch.cuda.is_available()`` ask NVML, unless the user decided otherwise.

    By default it starts CUDA, and no process that is forked afterwards could use it.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def fix_cublas_workspace() -> None:
    """Make cuBLAS deterministic, unless the user decided otherwise. It reads the variable at its first use."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def cache_directory() -> Path:
    """Return the directory for what can be downloaded again."""
    if given := os.environ.get(_CACHE):
        return Path(given).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "phalanx").absolute()


def nvme_path() -> str | None:
    """Return the default folder for offloaded state, or None."""
    return os.environ.get(_NVME_PATH) or None


def nvme_default(folder: str) -> dict[str, str]:
    """Return the variable that makes a folder the one of ``nvme_path``; none if the user has set it."""
    return {} if nvme_path() else {_NVME_PATH: folder}


def library_variable(name: str) -> str | None:
    """Return a variable of another library, None if it is not set or empty."""
    return os.environ.get(name) or None


def set_library_default(name: str, value: str) -> None:
    """Set a variable of another library, unless the user has set it."""
    os.environ.setdefault(name, value)


def is_quiet() -> bool:
    """Whether the user wants to see warnings and errors only."""
    return os.environ.get(_QUIET, "0") not in ("", "0")


def takes_colors(stream: Any) -> bool:
    """Whether text for a stream may have colours: it is a terminal, and ``NO_COLOR`` is not set."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def moves_cursor(stream: Any) -> bool:
    """Whether a stream is a terminal in which text can be drawn again."""
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def progress_choice() -> str | None:
    """Return how the user wants to see progress: ``"rich"``, ``"plain"`` or ``"off"``; None for the default.

    Raises:
        UnknownNameError: the variable has another value.
    """
    choice = os.environ.get(_PROGRESS) or None
    if choice is not None and choice not in _PROGRESS_CHOICES:
        raise unknown(_PROGRESS, choice, _PROGRESS_CHOICES)
    return choice


def pins_batches() -> bool:
    """Whether batches for a GPU should be in pinned memory: unless the user decided otherwise."""
    return os.environ.get(_PIN_MEMORY, "1") not in ("", "0")


def build_tools(default: str = "c++") -> tuple[str, list[str]]:
    """Return the C++ compiler to build with, and the user's own flags for compiling and linking.

    Args:
        default: the compiler if the user has not chosen one: torch builds extensions with ``c++``, and what
            ``torch.compile`` generates with ``g++``.
    """
    flags = [os.environ.get(name, "") for name in ("CFLAGS", "LDFLAGS")]
    return os.environ.get("CXX") or default, [flag for each in flags for flag in shlex.split(each)]


@contextlib.contextmanager
def library_environment(**variables: str) -> Iterator[None]:
    """Set variables that a library reads, within the context. On PATH the interpreter's folder is first.

    The tools of a virtual environment (such as ninja) are then found even if it was not activated.
    """
    search = [str(Path(sys.executable).parent), *filter(None, [os.environ.get("PATH")])]
    variables = {"PATH": os.pathsep.join(search), **variables}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def error_dir() -> str | None:
    """Return the directory into which a rank that phalanx started writes its records, or None elsewhere."""
    return os.environ.get(ERROR_DIR) or None


def own_records() -> RankRecords:
    """Return the records for this process's supervisor; without one, nothing is recorded."""
    return RankRecords(error_dir())


def hiding_secrets() -> Callable[[str], str]:
    """Return a function that replaces the values of this process's secret variables in a text."""
    return hiding(os.environ)


def attempt() -> int:
    """Return the number of earlier attempts of this launch."""
    return int(os.environ.get(ATTEMPT) or 0)


def num_ranks_may_change() -> bool:
    """Whether the launcher of this rank may start the run again with another number of ranks."""
    return bool(os.environ.get(ELASTIC))


def ranks_are_restarted() -> bool:
    """Whether the launcher of this rank starts ranks that fail again."""
    return bool(os.environ.get(RESTARTS))


def sets_threads() -> bool:
    """Whether a variable sets the number of threads of this process."""
    return bool(os.environ.get("OMP_NUM_THREADS"))


def started_by_torchrun() -> bool:
    """Whether torchrun started this process: another launcher, or the user, may set the same variables."""
    return bool(os.environ.get("TORCHELASTIC_RUN_ID"))


def uses_agent_store() -> bool:
    """Whether torchrun's own process serves the rendezvous store of its ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def keep_rendezvous_store_apart() -> None:
    """Make torch's elastic rendezvous in this process open no port for another store."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


def gloo_interface() -> str | None:
    """Return the network interface that the user chose for gloo, or None."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or None


def take_store_descriptor() -> int | None:
    """Return the listening socket that this rank inherited, or None; the variable is removed from the environment."""
    inherited = os.environ.pop(STORE_FD, "")
    return int(inherited) if inherited else None


@contextlib.contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables within the context; at the end the whole environment is restored, whatever else has changed it."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def starting_command() -> str:
    """Return the command that has started this process, or the ranks if it is one of them, as a shell reads it."""
    overrides = script_overrides()
    own = [sys.executable, *sys.orig_argv[1:]] if overrides is None else overrides.command
    return os.environ.get(COMMAND) or shlex.join(own)


def import_without_warnings(name: str) -> None:
    """Import torch, or a library that imports it, such that its C++ code prints errors but no warnings.

    When another host has ended, torch warns of each connection with a stack of twenty lines.
    """
    with variables_set({_TORCH_LOG: os.environ.get(_TORCH_LOG, "ERROR")}):
        importlib.import_module(name)
