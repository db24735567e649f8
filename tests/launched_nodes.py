"""``phalanx launch`` as a test starts it, on one node or on two that are this machine, and scripts for its ranks."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path

from free_ports import FIRST, free_port
from ranks import completed, end_session, started_script

# The command, in a process that may have torch imported. Its limits on time are a few seconds: a launcher on a machine
# that is busy may give no sign of life for five.
LAUNCH = """
import sys
from phalanx.cli.main import main
from phalanx.framework.launch import node_records, supervisor
node_records.KEEP_ALIVE_SECONDS, node_records.KEEP_ALIVE_ATTEMPTS, supervisor.PREEMPT_SECONDS = 1, 8, 5.0
sys.exit(main(['launch', *sys.argv[1:]]))
"""
# Records each start of a rank, and does what the second argument says, once or in every attempt.
RANK = """
import json, os, pathlib, signal, sys, time
root, what, at = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
rank, attempt = os.environ["RANK"], os.environ["PHALANX_ATTEMPT"]
text = json.dumps([*map(os.environ.get, names), *sys.argv[4:]])
(root / f"rank_{rank}_{attempt}.draft").write_text(text)
(root / f"rank_{rank}_{attempt}.draft").rename(root / f"rank_{rank}_{attempt}")
others = [root / f"rank_{other}_{attempt}" for other in range(int(os.environ["WORLD_SIZE"]))]
while not all(path.exists() for path in others):
    time.sleep(0.01)
if what == "kill" and rank == at and attempt == "0":
    os.kill(os.getpid(), signal.SIGKILL)
codes = {"refuse": 78, "leave": 75}
if what in codes and rank == at:
    sys.exit(codes[what])
if what != "end" and (what == "wait" or attempt == "0"):
    time.sleep(60)
    (root / f"end_of_rank_{rank}").touch()
"""


def started(root: Path) -> dict[str, list[str]]:
    """Return what each rank recorded at its start, by rank and attempt."""
    return {path.name: json.loads(path.read_text()) for path in sorted(root.glob("rank_*_[0-9]"))}


@contextlib.contextmanager
def several_nodes(
    count: int,
    *arguments: str,
    nodes: str | None = None,
    temporary: Path | None = None,
    new: Collection[int] = (),
    as_tasks: bool = False,
    caches: Path | None = None,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the command on nodes, all of which are this machine; one rank on each.

    Args:
        count: the number of launchers.
        arguments: options, the script and its arguments.
        nodes: the value of ``--nodes``, by default ``count``.
        temporary: the directory for the files that launchers leave behind if they are killed.
        new: the nodes whose launchers are new interpreters.
        as_tasks: whether the nodes are known by the variables of srun instead of options.
        caches: a folder in which each node has a cache of its own.
    """
    port = free_port()
    with contextlib.ExitStack() as stack:
        started = []
        for node in range(count):
            place = [] if as_tasks else ["--node-rank", str(node), "--rdzv", f"127.0.0.1:{port}"]
            variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            variables |= {} if temporary is None else {"TMPDIR": str(temporary)}
            variables |= _task(node, port) if as_tasks else {}
            variables |= {} if caches is None else {"PHALANX_CACHE": str(caches / str(node))}
            options = ["-n", "1", "--nodes", nodes or str(count), *place, *arguments]
            process = started_script(LAUNCH, *options, env=variables, is_new=node in new)
            started.append(stack.enter_context(process))
        try:
            yield started
        except BaseException:
            for node, each in enumerate(started):
                end_session(each.pid)
                with contextlib.suppress(ValueError, subprocess.TimeoutExpired):
                    print(f"--- node {node} printed:\n{each.communicate(timeout=10)[0][-6000:]}")
            raise


def _task(node: int, port: int) -> dict[str, str]:
    """Return the variables that srun sets for one of two tasks on as many nodes, both of which are this machine."""
    # A script of this name has the job name by which interactive shells are known.
    job = {"SLURM_JOB_ID": str(port - FIRST), "SLURM_JOB_NAME": "interactive", "SLURM_STEP_ID": "0"}
    step = {"SLURM_STEP_NODELIST": "localhost,node[2-2]", "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS": "2"}
    place = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": str(node), "SLURM_NODEID": str(node)}
    return {**job, **step, **place, "SLURM_LOCALID": "0"}


def outcome(nodes: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Return the exit codes of all nodes, and what they printed."""
    done = [completed(node, 90.0) for node in nodes]
    return [each.returncode for each in done], [each.stdout for each in done]
