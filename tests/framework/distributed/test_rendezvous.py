"""How ranks meet: on one address, again and again, and never with those of another start."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from free_ports import free_port
from messages import refuses
from model_script import MODEL
from ranks import warm_python

from phalanx.framework.core.errors import ConfigurationError, Preempted
from phalanx.framework.distributed import rendezvous
from phalanx.framework.distributed.listening import listen
from phalanx.framework.distributed.rendezvous import _check_interface
from phalanx.framework.system.failure_records import RankRecords
from phalanx.framework.system.launcher_env import Placement

# An address of this machine alone that nothing else in these tests uses.
ADDRESS = "127.9.8.7"
SCRIPT = """
import os, sys
import torch.distributed as dist
from phalanx.framework.distributed.world import World

for _ in range(2):
    world = World.from_environment("cpu", timeout_seconds=float(sys.argv[1]))
    told = world.all_gather_object(world.placement.run)
    world.barrier()
    world.close()
    dist.destroy_process_group()
links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
inodes = [os.readlink(link) for link in links if os.path.islink(link)]
places = [line.split()[1].split(":")[0] for table in ("tcp", "tcp6") for line in list(open("/proc/net/" + table))[1:]
          if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in inodes]
print("met", *told, "listening on", *places)
"""


TURN = """
import os, signal
from phalanx.framework.core.errors import RankError
from phalanx.framework.distributed.rank_zero_first import first_in_turn
from phalanx.framework.distributed.world import World

world = World.from_environment("cpu")
try:
    with first_in_turn(world, local=True):
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
except RankError as error:
    print(error, flush=True)
    os._exit(7)
"""


ALONE = f"""{MODEL}
import threading
from phalanx.framework.distributed import rendezvous

def tell():
    while not rendezvous.is_waiting():
        time.sleep(0.01)
    print("waits", flush=True)

threading.Thread(target=tell, daemon=True).start()
Trainer(strategy="ddp", devices=2, accelerator="cpu", **quiet).fit(Model(), loader(4))
"""


def start(
    rank: int, restart: int, port: int, seconds: float, script: Path, nodes: tuple[int, ...] = (2,)
) -> subprocess.Popen[str]:
    places = [(node, local) for node, count in enumerate(nodes) for local in range(count)]
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_RESTART_COUNT": str(restart),
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(places[rank][0]),
        "SLURM_LOCALID": str(places[rank][1]),
        "SLURM_NTASKS": str(len(places)),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, nodes)),
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    return warm_python().start(script, [str(seconds)], script.parent, {**os.environ, **job})


def test_ranks_meet_twice_on_one_address_and_not_those_of_an_earlier_start(tmp_path: Path) -> None:
    script, port = tmp_path / "script.py", free_port()
    script.write_text(SCRIPT)
    old = start(1, 0, port, 3.0, script)
    ranks = [start(rank, 1, port, 60.0, script) for rank in range(2)]
    try:
        printed = [process.communicate(timeout=60)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], printed
        # 127.9.8.7 as the kernel writes it.
        assert printed == ["met 7.0.1 7.0.1 listening on 0708097F\n", "met 7.0.1 7.0.1 listening on\n"]
        text = old.communicate(timeout=60)[0]
        assert old.returncode == 1
        assert "met" not in text
    finally:
        for process in (old, *ranks):
            process.kill()
            process.wait()


def test_a_store_listens_on_all_addresses_where_its_name_leads_to_none_that_others_reach() -> None:
    for name, alone in (("127.0.0.1", True), ("localhost", True), ("127.0.0.1", False)):
        with socket.socket(fileno=listen(name, free_port(), 2, alone)) as listening:
            found = listening.getsockname()[0]
            assert found in (("127.0.0.1", "::1") if alone else ("::", "0.0.0.0"))


def test_a_taken_port_and_an_invalid_host_are_reported_in_one_sentence() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with refuses(ConfigurationError, f"MASTER_PORT={port}", varies=str(port)):
            listen("127.0.0.1", port, 2, alone=False)
    with refuses(ConfigurationError, "MASTER_ADDR='no.such.host.invalid'", varies=r"\(.*\)"):
        listen("no.such.host.invalid", port, 2, alone=False)


def test_an_interface_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    _check_interface()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eht")
    with refuses(ConfigurationError, "GLOO_SOCKET_IFNAME='lo,eht'", "'eht'", varies="It has .*"):
        _check_interface()


def test_one_process_has_no_token() -> None:
    assert Placement().run == ""


def test_who_waits_for_a_first_rank_that_is_killed_learns_it_on_all_nodes(tmp_path: Path) -> None:
    # srun leaves the others be, unless it is told otherwise.
    script, port = tmp_path / "script.py", free_port()
    script.write_text(TURN)
    ranks = [start(rank, 0, port, 60.0, script, nodes=(1, 2)) for rank in range(3)]
    try:
        assert ranks[1].wait(timeout=60) == -signal.SIGKILL
        for rank in (0, 2):
            told, _ = ranks[rank].communicate(timeout=20)
            assert told == "the block that this rank waited for failed on rank 1: its process has ended\n"
            assert ranks[rank].returncode == 7
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_a_rank_that_waits_for_others_ends_on_a_signal(tmp_path: Path) -> None:
    script, port = tmp_path / "script.py", free_port()
    script.write_text(ALONE)
    for rank in (0, 1):
        process = start(rank, 0, port, 60.0, script)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waits\n"
            process.terminate()
            told, _ = process.communicate(timeout=20)
            assert "SIGTERM came while this rank waited for the others to start; run the same command again." in told
            assert process.returncode == Preempted.exit_code
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(("backend", "left"), [("cpu:gloo,cuda:nccl", True), ("cpu:gloo", False)])
def test_a_failing_rank_does_not_wait_for_collectives_of_nccl(
    backend: str, left: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    removed: list[Any] = []
    monkeypatch.setattr(atexit, "unregister", removed.append)
    monkeypatch.setattr(rendezvous, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(rendezvous, "own_records", lambda: RankRecords(str(tmp_path)))
    rendezvous._abandon()
    assert removed == ([rendezvous._leave] if left else [])
    # The supervisor compares the times at which ranks began to leave.
    assert (RankRecords(str(tmp_path)).left_at(3) is not None) == left
