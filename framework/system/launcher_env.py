"""``Placement``: the rank of a process, the number of ranks and their nodes, read from its launcher's variables.

Pure functions over a mapping of environment variables; ``environment.py`` passes the real one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..core.errors import ConfigurationError

Launcher = Literal["phalanx", "torchrun", "slurm", "mpi"]
LOOPBACK = "127.0.0.1"
# Marks a rank that phalanx started, and names the directory for its records.
ERROR_DIR = "PHALANX_ERROR_DIR"
# The number of earlier attempts of this launch.
ATTEMPT = "PHALANX_ATTEMPT"
# Whether the next attempt may have another number of ranks.
ELASTIC = "PHALANX_ELASTIC"
RESTARTS = "PHALANX_RESTARTS"
# A random value, a new one for each attempt.
RUN = "PHALANX_RUN"
# The command that has started the ranks, as a shell reads it.
COMMAND = "PHALANX_COMMAND"
# The address of the rendezvous again: scripts set MASTER_ADDR and MASTER_PORT, as tutorials of PyTorch do.
HOST, PORT = "PHALANX_HOST", "PHALANX_PORT"
# The working directory in which the script called phalanx, in the process that has started the ranks.
DIRECTORY = "PHALANX_DIRECTORY"
# The descriptor of the socket on which rank 0 serves the rendezvous.
STORE_FD = "PHALANX_STORE_FD"
# The number of a SLURM job whose file requeues it after the exit code of a preemption, so that the run does not, too.
REQUEUES = "PHALANX_JOB_REQUEUES"

_TITLES = {"phalanx": "phalanx", "torchrun": "torchrun", "slurm": "SLURM", "mpi": "mpirun"}
_HOW_TO_START = {
    "phalanx": "phalanx launch -n {}",
    "torchrun": "--nproc-per-node={}",
    "slurm": "srun --ntasks-per-node={}",
    "mpi": "mpirun with {} processes on each node",
}


@dataclass(frozen=True)
class Placement:
    """The rank of a process, the number of ranks and their nodes. ``launcher`` is ``None`` for a process that was
    started alone.

    ``run`` is the same on all ranks of one start of a run, and differs between starts. It is empty if the launcher sets
    no such value.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    launcher: Launcher | None = None
    run: str = ""


def variables_of(place: Placement) -> dict[str, str]:
    """Return the variables from which a rank that phalanx starts reads its placement."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        **dict.fromkeys(("MASTER_ADDR", HOST), str(place.master_addr)),
        **dict.fromkeys(("MASTER_PORT", PORT), str(place.master_port)),
        **({} if place.num_nodes > 1 else _on_loopback()),
    }


def read_placement(variables: Mapping[str, str], num_nodes: int = 1) -> Placement:
    """Return the placement that ``variables`` describe: those of torchrun or phalanx, of SLURM, or of Open MPI.

    ``num_nodes`` is only used if the launcher does not set the number of ranks per node.

    Raises:
        ConfigurationError: the variables contradict one another, or one that is needed is missing.
    """
    read = _Reader(variables)
    if read.text("RANK") is not None or read.text("WORLD_SIZE") is not None:
        return _from_torchrun(read, num_nodes)
    if read.is_slurm_step():
        return _from_slurm(read)
    if read.text("OMPI_COMM_WORLD_SIZE") is not None:
        return _from_mpi(read)
    return Placement()


def read_node(variables: Mapping[str, str], num_nodes: int) -> tuple[int | None, str | None, int | None]:
    """Return the number of this node, and host and port of node 0, for a process that is started once on each node.

    They are those of SLURM or Open MPI if it has started one process on each of ``num_nodes`` nodes, and else those of
    NODE_RANK, MASTER_ADDR and MASTER_PORT; None stands for a variable that is not set.

    Raises:
        ConfigurationError: the variables contradict one another, or a number is none.
    """
    read = _Reader(variables)
    place = _from_slurm(read) if read.is_started_by_srun() else read_placement(variables)
    if place.num_nodes == place.size == num_nodes:
        return place.node_rank, place.master_addr, place.master_port
    return read.number("NODE_RANK"), read.text("MASTER_ADDR"), read.number("MASTER_PORT")


@dataclass(frozen=True)
class Job:
    """A SLURM job; ``end`` is the time at which its limit expires, in seconds since 1970, or None."""

    name: str
    end: int | None
    requeues: bool = False
    """Whether the job file requeues the job after a preemption."""


def read_job(variables: Mapping[str, str]) -> Job | None:
    """Return the SLURM job that ``variables`` describe, or None.

    Raises:
        ConfigurationError: the time of its limit is not a number.
    """
    read = _Reader(variables)
    name = read.text("SLURM_JOB_ID", "SLURM_JOBID")
    if name is None:
        return None
    array, task = read.text("SLURM_ARRAY_JOB_ID"), read.text("SLURM_ARRAY_TASK_ID")
    requeues = read.text(REQUEUES) == name
    return Job(f"{array}_{task}" if array and task else name, read.number("SLURM_JOB_END_TIME"), requeues)


def check_devices(requested: int, placement: Placement, num_nodes: int = 1) -> None:
    """Raise unless the launcher started ``requested`` processes on each of ``num_nodes`` nodes.

    Raises:
        ConfigurationError: the numbers differ.
    """
    if placement.launcher is None and placement.size == 1:
        return
    launcher = _TITLES.get(placement.launcher or "", "the process group")
    if requested != placement.local_size:
        processes = "process" if placement.local_size == 1 else "processes"
        each = " on this node" if placement.num_nodes > 1 else ""
        started = "holds" if placement.launcher is None else "started"
        again = _HOW_TO_START.get(placement.launcher or "")
        raise ConfigurationError(
            f"devices={requested} but {launcher} {started} {placement.local_size} {processes}{each}: one process "
            f"drives one device. Set devices={placement.local_size} or devices='auto'"
            + (f", or start them with {again.format(requested)}." if again else ".")
        )
    if num_nodes != placement.num_nodes:
        raise ConfigurationError(
            f"num_nodes={num_nodes} but {launcher} runs on {placement.num_nodes}: set num_nodes={placement.num_nodes}."
        )


class _Reader:
    """Typed access to the variables. An empty variable counts as not set."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def text(self, *names: str) -> str | None:
        return next((value for name in names if (value := self._variables.get(name))), None)

    def number(self, *names: str) -> int | None:
        for name in names:
            if value := self._variables.get(name):
                if not value.isdecimal():
                    raise ConfigurationError(
                        f"{name}={value!r} in the environment: a whole number is needed, 0 or more."
                    )
                return int(value)
        return None

    def is_slurm_step(self) -> bool:
        # A batch script outside srun, and an interactive shell, have the variables of the job but consist of one
        # process.
        interactive = self.text("SLURM_JOB_NAME") in {"bash", "interactive"}
        return self.is_started_by_srun() and not interactive and self.number("SLURM_NTASKS") is not None

    def is_started_by_srun(self) -> bool:
        return self.text("SLURM_STEP_NODELIST", "SLURM_STEP_ID", "SLURM_STEPID") is not None


def _from_torchrun(read: _Reader, num_nodes: int) -> Placement:
    rank, size = read.number("RANK"), read.number("WORLD_SIZE")
    if rank is None or size is None:
        given, missing = ("RANK", "WORLD_SIZE") if size is None else ("WORLD_SIZE", "RANK")
        raise ConfigurationError(
            f"{given}={read.text(given)} is in the environment but {missing} is not. A launcher such as torchrun sets "
            f"both; set {missing} too, or unset {given} to run one process."
        )
    nodes = read.number("GROUP_WORLD_SIZE") or num_nodes
    local_size = read.number("LOCAL_WORLD_SIZE") or max(1, size // nodes)
    local_rank = read.number("LOCAL_RANK")
    node_rank = read.number("GROUP_RANK", "NODE_RANK")
    launched_by_us = read.text(ERROR_DIR) is not None
    return _checked(
        Placement(
            rank=rank,
            size=size,
            local_rank=rank % local_size if local_rank is None else local_rank,
            local_size=local_size,
            node_rank=rank // local_size if node_rank is None else node_rank,
            num_nodes=read.number("GROUP_WORLD_SIZE") or max(1, size // local_size),
            master_addr=read.text(*([HOST] if launched_by_us else []), "MASTER_ADDR"),
            master_port=read.number(*([PORT] if launched_by_us else []), "MASTER_PORT"),
            launcher="phalanx" if launched_by_us else "torchrun",
            run=(read.text(RUN) or "") if launched_by_us else "",
        )
    )


def _from_slurm(read: _Reader) -> Placement:
    size = read.number("SLURM_NTASKS") or 1
    rank = read.number("SLURM_PROCID") or 0
    node_rank = read.number("SLURM_NODEID") or 0
    nodes = read.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES") or 1
    tasks = _tasks_per_node(read.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or "")
    local_size = tasks[node_rank] if node_rank < len(tasks) else max(1, size // nodes)
    hosts = read.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    local_rank = read.number("SLURM_LOCALID")
    # All tasks must choose the same port without a message between them: it follows from the job's number, below the
    # range from which the kernel assigns ports.
    job = read.number("SLURM_JOB_ID", "SLURM_JOBID") or 0
    return _checked(
        Placement(
            rank=rank,
            size=size,
            local_rank=rank % local_size if local_rank is None else local_rank,
            local_size=local_size,
            node_rank=node_rank,
            num_nodes=nodes,
            master_addr=read.text("MASTER_ADDR") or (first_host(hosts) if hosts else LOOPBACK),
            master_port=read.number("MASTER_PORT") or 20000 + job % 10000,
            launcher="slurm",
            run=".".join(read.text(name) or "" for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")),
        )
    )


def _from_mpi(read: _Reader) -> Placement:
    size = read.number("OMPI_COMM_WORLD_SIZE") or 1
    rank = read.number("OMPI_COMM_WORLD_RANK") or 0
    local_size = read.number("OMPI_COMM_WORLD_LOCAL_SIZE") or size
    local_rank = read.number("OMPI_COMM_WORLD_LOCAL_RANK")
    return _checked(
        Placement(
            rank=rank,
            size=size,
            local_rank=rank % local_size if local_rank is None else local_rank,
            local_size=local_size,
            # OMPI_COMM_WORLD_NODE_RANK is the rank within the node, not the node's number.
            node_rank=rank // local_size,
            num_nodes=max(1, size // local_size),
            master_addr=read.text("MASTER_ADDR") or (LOOPBACK if local_size == size else None),
            master_port=read.number("MASTER_PORT"),
            launcher="mpi",
            run=read.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid") or "",
        )
    )


def _checked(placement: Placement) -> Placement:
    if placement.size < 1 or placement.rank >= placement.size:
        raise ConfigurationError(
            f"The environment says rank {placement.rank} of {placement.size}: a rank lies between 0 and the number of "
            "processes less one. Check what your launcher sets."
        )
    if placement.local_rank >= placement.local_size:
        raise ConfigurationError(
            f"The environment says local rank {placement.local_rank} of {placement.local_size} on this node: set "
            "LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun does."
        )
    needed = {"MASTER_ADDR": placement.master_addr, "MASTER_PORT": placement.master_port}
    missing = [name for name, value in needed.items() if value is None]
    if placement.size > 1 and missing:
        raise ConfigurationError(
            f"{placement.size} processes were started but {' and '.join(missing)} is not in the environment: they "
            "cannot connect. Set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port on it, the same for "
            "all of them."
        )
    return placement


def first_host(hosts: str) -> str:
    """Return the first host of SLURM's compact list, such as ``node[03-05,07],login1``."""
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", head.group() if head else hosts)


def _tasks_per_node(text: str) -> list[int]:
    """Read SLURM's ``4(x2),3`` as [4, 4, 3]."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, repeats in found for _ in range(int(repeats or 1))]


def _on_loopback() -> dict[str, str]:
    """Return variables with which no socket of the ranks can be reached from another machine."""
    interface = "lo" if os.path.exists("/sys/class/net/lo") else "lo0"
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
