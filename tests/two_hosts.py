"""Two hosts on one machine: network namespaces that a cable joins, and scripts on each of them.

two_hosts.py NETWORK SCRIPT ARGUMENT...       run a script in the network of a host
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ranks import warm_python
from torch.distributed import run

# In namespaces of their own: nobody else can have them.
PORT = 29500
ADDRESSES = ("10.213.7.1", "10.213.7.2")
_CABLE = "cable"
_CLONE_NEWNET = 0x40000000


def reason_against() -> str | None:
    """Say why this machine cannot have two hosts, or None."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "there is no `ip` here, which makes network namespaces"
    hosts = TwoHosts()
    try:
        hosts.lay()
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {error.stderr.strip()}"
    finally:
        hosts.remove()
    return None


class TwoHosts:
    """Two namespaces and the cable between them."""

    def __init__(self) -> None:
        number = uuid.uuid4().hex[:6]
        self.names = (f"phalanx-{number}-0", f"phalanx-{number}-1")

    def lay(self) -> None:
        """Make the hosts and connect them."""
        for name in self.names:
            _ip("netns", "add", name)
        first, second = self.names
        _ip("link", "add", _CABLE, "netns", first, "type", "veth", "peer", "name", _CABLE, "netns", second)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", _CABLE)
            _ip("-n", name, "link", "set", "lo", "up")
        self.heal()

    def cut(self) -> None:
        """Pull the cable out: what is sent gets lost, and nobody is told."""
        for name in self.names:
            _ip("-n", name, "link", "set", _CABLE, "down")

    def heal(self) -> None:
        """Put the cable in."""
        for name in self.names:
            _ip("-n", name, "link", "set", _CABLE, "up")

    def slow(self) -> bool:
        """Let the cable carry only 16 kB in a second, each way; return whether this machine can."""
        for name in self.names:
            limit = ["rate", "128kbit", "burst", "1600", "latency", "5s"]
            try:
                _run("tc", "-n", name, "qdisc", "add", "dev", _CABLE, "root", "tbf", *limit)
            except (FileNotFoundError, subprocess.CalledProcessError):
                return False
        return True

    def speed_up(self) -> None:
        """Undo ``slow``."""
        for name in self.names:
            _run("tc", "-n", name, "qdisc", "delete", "dev", _CABLE, "root")

    def remove(self) -> None:
        """Take the hosts down, with what still runs on them."""
        for name in self.names:
            done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in done.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def start_launched(
        self, launcher: Path, script: Path, arguments: Sequence[str], folder: Path, nodes: str = "2"
    ) -> list[subprocess.Popen[bytes]]:
        """Start a script on both hosts with ``phalanx launch --nodes``, which another script runs; one rank on each."""
        meeting = ["-n", "1", "--nodes", nodes, "--rdzv", f"{ADDRESSES[0]}:{PORT}"]
        command = [sys.executable, str(launcher), *meeting, "--node-rank"]
        return [
            self._execute(n, [*command, str(n), str(script), *arguments], folder, self._environment(n, folder))
            for n in range(2)
        ]

    def start_as_slurm(
        self, script: Path, arguments: Sequence[str], folder: Path, libraries: tuple[str, ...] = ()
    ) -> list[subprocess.Popen[str]]:
        """Start a script on both hosts with the variables that srun sets.

        What they print is in ``host_<n>.txt`` of ``folder``; ``libraries``: those that it finds imported.
        """
        job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
        job |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
        job |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)}
        tasks = [job | {"SLURM_PROCID": str(n), "SLURM_NODEID": str(n)} for n in range(2)]
        command = [str(script), *arguments]
        return [self._start(n, command, folder, task, libraries) for n, task in enumerate(tasks)]

    def start_elastic(self, number: int, script: Path, arguments: Sequence[str], folder: Path) -> subprocess.Popen[str]:
        """Start a script with torchrun, to run on as many hosts as there are; each change starts it again."""
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}", "--rdzv-id=elastic"]
        # Both have the name of this machine, by which torchrun would tell whose port that is.
        conf = f"--rdzv-conf=is_host={int(number == 0)},last_call_timeout=2,keep_alive_interval=1"
        place = ["--nnodes=1:2", "--max-restarts=9", "--monitor-interval=0.2", f"--local-addr={ADDRESSES[number]}"]
        command = [run.__file__, "--nproc-per-node=1", *meeting, conf, *place, str(script), *arguments]
        # Else a host that comes later waits for an address that the first one has told the earlier hosts alone.
        return self._start(number, command, folder, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})

    def _execute(
        self, number: int, command: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, as a new process."""
        with (folder / f"host_{number}.txt").open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[number], *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def _start(
        self,
        number: int,
        command: Sequence[str],
        folder: Path,
        variables: Mapping[str, str] | None = None,
        libraries: tuple[str, ...] = (),
    ) -> subprocess.Popen[str]:
        inside = [self.names[number], *command]
        environment = {**self._environment(number, folder), **(variables or {})}
        with (folder / f"host_{number}.txt").open("ab") as output:
            python = warm_python("cpu", libraries)
            return python.start(Path(__file__), inside, Path.cwd(), environment, output.fileno())

    @staticmethod
    def _environment(number: int, folder: Path) -> dict[str, str]:
        # torchrun leaves a folder there.
        own = folder / f"tmp_{number}"
        own.mkdir(exist_ok=True)
        return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": _CABLE, "TMPDIR": str(own)}


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Give two hosts that can reach one another; they are gone at the end."""
    hosts = TwoHosts()
    try:
        hosts.lay()
        yield hosts
    finally:
        hosts.remove()


def ended(processes: Sequence[subprocess.Popen[Any]], seconds: float) -> list[int]:
    """Return the exit codes of processes that end in time; the others are killed.

    Raises:
        TimeoutError: one did not end.
    """
    until = time.monotonic() + seconds
    late = []
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(process)
    for process in late:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if late:
        raise TimeoutError(f"{len(late)} of {len(processes)} hosts did not end within {seconds:g} s")
    return [process.returncode for process in processes]


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)


def run_inside(network: str, script: str, *arguments: str) -> None:
    """Run a script in the network of a host."""
    with open(f"/run/netns/{network}") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"the network {network} cannot be entered")
    sys.argv[:] = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    run_inside(*sys.argv[1:])
