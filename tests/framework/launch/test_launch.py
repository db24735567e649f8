"""Starting ranks, and how they end: scripts run as a user runs them, in processes of their own."""

from __future__ import annotations

import multiprocessing
import multiprocessing.synchronize
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from messages import refuses
from model_script import MODEL
from ranks import run_command, run_script, session_pids, started_script, wait_until

from phalanx.framework.core.errors import ConfigurationError, RankError
from phalanx.framework.distributed.world import World
from phalanx.framework.launch.exit_hooks import _kill_workers
from phalanx.framework.launch.fork_launcher import launch_function
from phalanx.framework.launch.launch_context import _remove_stale
from phalanx.framework.launch.script_launcher import launch_script
from phalanx.framework.system.entry_script import _parsed, can_rerun_script
from phalanx.framework.system.file_lock import lock
from phalanx.framework.system.launcher_env import ERROR_DIR

# What each script begins with: the first process becomes the supervisor, and what follows is for the ranks.
HEAD = """
import os, signal, sys, time
import torch
from phalanx.framework.core.errors import ConfigurationError, Preempted
from phalanx.framework.launch.exit_hooks import install_rank_hooks
from phalanx.framework.launch.script_launcher import launch_script
from phalanx.framework.distributed.world import World, placement

place = placement()
if place.launcher is None:
    print("supervisor", os.getpid(), flush=True)
    launch_script(2)
install_rank_hooks(place)
"""
MEET = HEAD + "world = World.from_environment('cpu')\nworld.barrier()\n"
# Ranks that depend on one another, as in training: one that is left alone fails in its collective.
TRAIN = "while True: world.all_reduce(torch.ones(2)); time.sleep(0.002)\n"


def test_a_rank_that_raises_is_named_with_its_traceback_last_and_once() -> None:
    done = run_script(MEET + "if world.rank == 1: raise KeyError('the cause')\n" + TRAIN)
    lines = done.stdout.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("rank 1 (pid "))
    assert lines[start].endswith(") failed:")
    assert lines[start + 1] == "Traceback (most recent call last):"
    assert lines[-1] == "KeyError: 'the cause'"
    assert done.stdout.count("Traceback") == 1
    assert done.returncode == 1


LEAVES = f"""{MODEL}
class Leaving(Model):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            os._exit(0)
        return super().training_step(batch, batch_idx)

trainer = Trainer(accelerator='cpu', devices=2, strategy='ddp', max_epochs=1, enable_report=False, **quiet)
trainer.fit(Leaving(), loader(8, 2))
"""


def test_a_rank_that_leaves_a_fit_without_an_error_is_named() -> None:
    done = run_script(LEAVES)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("rank 1 (pid ")
    assert "exit code 0" in last
    assert done.returncode != 0


def test_ranks_that_are_preempted_end_by_themselves_with_their_message() -> None:
    # Rank 0 is the last to end: nobody may cut short what it still writes.
    source = MEET + "time.sleep(1.0 * (world.rank == 0)); print('saved'); raise Preempted('saved; run it again')\n"
    done = run_script(source)
    assert done.stdout.splitlines()[-1] == "saved; run it again"
    assert done.stdout.count("saved\n") == 2
    assert "Traceback" not in done.stdout
    assert done.returncode == 75


def test_processes_of_a_failed_rank_are_killed() -> None:
    source = MEET + (
        "import subprocess\n"
        "print('helper', subprocess.Popen(['sleep', '3600']).pid, flush=True)\n"
        "world.barrier()\n"
        "if world.rank == 1: raise ValueError('the cause')\n"
    )
    with started_script(source + TRAIN) as process:
        output = process.communicate(timeout=60)[0]
        assert output.count("helper") == 2
        assert session_pids(process.pid) == set()


def test_a_killed_supervisor_leaves_no_rank(tmp_path: Path) -> None:
    source = MEET + "print('training', flush=True)\n" + TRAIN
    # What it has no chance to remove goes where pytest does.
    with started_script(source, env={"TMPDIR": str(tmp_path)}) as process:
        read_until(process, "training", times=1)
        # What ranks are forked from may still be ending.
        wait_until(lambda: len(session_pids(process.pid)) == 3, seconds=5.0)
        process.kill()
        wait_until(lambda: not session_pids(process.pid), seconds=5.0)


@pytest.mark.parametrize(
    ("handler", "signum", "code"),
    [
        ("", signal.SIGTERM, 143),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n", signal.SIGTERM, 75),
        ("", signal.SIGINT, 130),
    ],
)
def test_a_signal_to_the_supervisor_reaches_the_ranks(handler: str, signum: int, code: int) -> None:
    # Ranks that have not met one another have nothing to lose, and end with 75.
    source = MEET + handler + "world.barrier()\nprint('training', flush=True)\nwhile True: time.sleep(0.05)\n"
    with started_script(source) as process:
        read_until(process, "training", times=1)
        process.send_signal(signum)
        output = process.communicate(timeout=60)[0]
        assert process.returncode == code
        assert "Traceback" not in output
        assert session_pids(process.pid) == set()


def test_ranks_listen_on_loopback_alone() -> None:
    source = MEET + (
        "world.all_reduce(torch.ones(1))\n"
        "inodes = set()\n"
        "for name in os.listdir('/proc/self/fd'):\n"
        "    try: target = os.readlink('/proc/self/fd/' + name)\n"
        "    except OSError: continue\n"
        "    if target.startswith('socket:['): inodes.add(target[8:-1])\n"
        "found = []\n"
        "for table in ('tcp', 'tcp6'):\n"
        "    for line in list(open('/proc/net/' + table))[1:]:\n"
        "        fields = line.split()\n"
        "        if fields[3] == '0A' and fields[9] in inodes: found.append(fields[1].split(':')[0])\n"
        "everyone = world.all_gather_object(found)\n"
        "if world.is_global_zero: print(*sum(everyone, []))\n"
    )
    done = run_script(source)
    addresses = done.stdout.splitlines()[-1].split()
    assert len(addresses) >= 3, done.stdout
    assert set(addresses) == {"0100007F"}


def test_under_another_launcher_a_rank_prints_its_own_traceback_and_keeps_its_code() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    done = run_script(HEAD + "raise ConfigurationError('no such thing')\n", env=alone)
    assert done.stdout.startswith("[rank 0] Traceback")
    assert done.stdout.count("[rank 0] Traceback") == 1
    assert done.stdout.splitlines()[-1].endswith("ConfigurationError: no such thing")
    assert done.returncode == 78


def test_the_exit_code_is_the_same_where_the_output_is_not_read() -> None:
    closed = (
        "import os\nif 'RANK' not in os.environ:\n"
        "    reading, writing = os.pipe()\n    os.close(reading)\n    os.dup2(writing, 2)\n"
    )
    done = run_script(closed + MEET + "raise ConfigurationError('no such thing')\n")
    assert done.returncode == 78
    assert "no such thing" not in done.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_prints_its_traceback_where_the_disk_is_full(rank: int) -> None:
    # As on a full disk: the name of its draft is taken.
    in_the_way = f"os.mkdir(os.path.join(os.environ[{ERROR_DIR!r}], 'rank_{rank}.draft'))"
    source = MEET + f"if place.rank == {rank}:\n    {in_the_way}\n    raise ValueError('planted')\n" + TRAIN
    done = run_script(source)
    assert "ValueError: planted" in done.stdout
    # It is killed if it takes longer, as on a busy machine.
    how = r"(ended with exit code 1|exited the process group and was killed)"
    assert re.fullmatch(rf"rank {rank} \(pid \d+\) {how}", done.stdout.splitlines()[-1])
    assert done.returncode == 1


def test_a_rank_that_left_without_a_record_is_to_blame_however_long_it_takes_to_exit() -> None:
    leaves = f"os.mkdir(os.path.join(os.environ[{ERROR_DIR!r}], 'rank_1.draft')); world.close(); time.sleep(60)"
    done = run_script(MEET + f"if place.rank == 1: {leaves}\n" + TRAIN)
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"rank 1 \(pid \d+\) exited the process group and was killed", last), done.stdout
    assert done.returncode == 1


def test_ranks_that_torchrun_starts_and_starts_again_meet_each_other(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # Its store is the same for all attempts, with what those of the first have told in it.
    script.write_text(
        "import os, signal\n" + MEET + "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    os.kill(os.getpid(), signal.SIGKILL) if place.rank == 1 else world.barrier()\n"
        "met = world.all_gather_object((place.rank, place.launcher))\nif world.is_global_zero: print('met', met)\n"
    )
    torchrun = "import sys\nfrom torch.distributed.run import main\nmain(sys.argv[1:])\n"
    again = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    done = run_script(torchrun, *again, str(script), env={"TMPDIR": str(tmp_path)}, timeout=90.0)
    assert "met [(0, 'torchrun'), (1, 'torchrun')]" in done.stdout, done.stdout
    assert done.returncode == 0


def stay(told: multiprocessing.synchronize.Event) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    told.set()
    time.sleep(60)


def test_a_process_that_fails_does_not_wait_for_a_loaders_workers() -> None:
    context = multiprocessing.get_context("fork")
    before = signal.getsignal(signal.SIGCHLD)
    children = []
    for daemon in (True, False):
        told = context.Event()
        children.append(context.Process(target=stay, args=(told,), daemon=daemon))
        children[-1].start()
        assert told.wait(30)
    try:
        _kill_workers()
        children[0].join(30)
        assert children[0].exitcode == -signal.SIGKILL
        # One that is no daemon is the user's own to end.
        assert children[1].is_alive()
    finally:
        signal.signal(signal.SIGCHLD, before)
        children[1].kill()
        children[1].join()


@pytest.fixture
def main_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that stands for the running script."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.delattr(sys, "ps1", raising=False)
    yield module
    monkeypatch.undo()


def test_a_script_can_be_run_again(main_module: ModuleType) -> None:
    main_module.__file__ = __file__
    assert can_rerun_script()


@pytest.mark.parametrize("file", [None, "/no/such/script.py", "<stdin>"])
def test_without_a_file_there_is_nothing_to_run_again(main_module: ModuleType, file: str | None) -> None:
    if file is not None:
        main_module.__file__ = file
    assert not can_rerun_script()
    with refuses(ConfigurationError, "script"):
        launch_script(2)


def test_an_interpreter_session_cannot_be_run_again(main_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    main_module.__file__ = __file__
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert not can_rerun_script()


def test_a_test_runner_is_not_run_again() -> None:
    assert not can_rerun_script()


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (["train.py", "-O"], []),
        (["-O", "train.py"], ["-O"]),
        (["-X", "dev", "-Wignore", "-u", "train.py", "-X"], ["-X", "dev", "-Wignore", "-u"]),
        (["-Xdev", "-m", "package.train", "-W"], ["-Xdev"]),
        (["-um", "train"], ["-u"]),
        (["-OW", "error", "-c", "code"], ["-OW", "error"]),
        (["--check-hash-based-pycs", "never", "-"], ["--check-hash-based-pycs", "never"]),
        ([], []),
    ],
)
def test_the_options_of_the_interpreter_are_found(arguments: list[str], flags: list[str]) -> None:
    assert _parsed(["python", *arguments])[0] == flags


def gather(word: str) -> list[tuple[int, str, int, str]]:
    world = World.from_environment("cpu")
    return world.all_gather_object((world.rank, word, os.getppid(), os.environ["RANK"]))


def test_a_function_runs_on_forked_ranks_and_gives_the_result_of_rank_0() -> None:
    before = dict(os.environ)
    mine = os.getpid()
    assert launch_function(gather, ("hello",), 2) == [(0, "hello", mine, "0"), (1, "hello", mine, "1")]
    assert dict(os.environ) == before


def test_a_closure_runs_on_forked_ranks() -> None:
    weights = torch.ones(3)
    total = launch_function(lambda: World.from_environment("cpu").all_reduce(weights.clone()), (), 2)
    assert total.tolist() == [2.0, 2.0, 2.0]


def compute(matrix: torch.Tensor) -> float:
    torch.set_num_threads(2)
    weight = torch.ones_like(matrix, requires_grad=True)
    (matrix @ weight).sum().backward()
    assert weight.grad is not None
    return weight.grad.mean().item()


def test_forked_ranks_compute_on_several_threads_after_this_process_did() -> None:
    # GNU OpenMP waits for ever for the workers of a pool that was there before the fork.
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        matrix = torch.ones(300, 300)
        assert compute(matrix) == 300.0
        assert launch_function(compute, (matrix,), 2) == 300.0
    finally:
        torch.set_num_threads(threads)


def fail_on_rank_1() -> None:
    world = World.from_environment("cpu")
    if world.rank == 1:
        raise ValueError("the cause")
    world.barrier()


def crash_on_rank_1() -> None:
    if World.from_environment("cpu").rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def return_a_lambda() -> object:
    return lambda: None


def test_a_forked_rank_that_fails_is_named_with_its_traceback() -> None:
    with refuses(RankError, "rank 1", "ValueError: the cause", varies=r"(?s)(?<=failed:\n).*"):
        launch_function(fail_on_rank_1, (), 2)


def test_a_forked_rank_that_is_killed_is_named_with_its_signal() -> None:
    with refuses(RankError, "rank 1", "SIGKILL"):
        launch_function(crash_on_rank_1, (), 2)


def test_a_result_that_cannot_be_sent_is_an_error_of_rank_0() -> None:
    with refuses(RankError, "rank 0", "pickle", varies=r"(?s)(?<=failed:\n).*"):
        launch_function(return_a_lambda, (), 2)


def test_cuda_in_use_forbids_forking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with refuses(ConfigurationError, "CUDA"):
        launch_function(gather, ("hello",), 2)


def test_a_query_that_started_cuda_forbids_forking_ranks_that_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # As torch answers after a plain `torch.cuda.is_available()`: not in this process, but in each copy of it.
    here = os.getpid()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != here)
    with refuses(ConfigurationError, "PYTORCH_NVML_BASED_CUDA_CHECK=1"):
        launch_function(gather, ("hello",), 2, uses_cuda=True)
    assert launch_function(gather, ("hello",), 2)[0][1] == "hello"
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    assert launch_function(gather, ("hello",), 2, uses_cuda=True)[0][1] == "hello"


def read_until(process: subprocess.Popen[str], text: str, times: int) -> None:
    """Read a script's output until ``text`` was printed ``times`` times."""
    assert process.stdout is not None
    seen = ""
    while seen.count(text) < times:
        line = process.stdout.readline()
        assert line, f"the script ended:\n{seen}"
        seen += line


def test_the_directory_of_a_killed_supervisor_is_removed_at_the_next_launch(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = tmp_path / f"phalanx-{gone.pid}-abc"
    mine = tmp_path / f"phalanx-{os.getpid()}-abc"
    other = tmp_path / "phalanx-notes-abc"
    # Another host's, whose process there has a number that is nobody's here.
    held = left.with_name(left.name + "held")
    for path in (left, mine, other, held):
        path.mkdir()
    handle = os.open(held, os.O_RDONLY)
    try:
        assert lock(handle)
        _remove_stale(tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted([mine, other, held])
    finally:
        os.close(handle)


CHANGED = (
    "import os, sys\n"
    "width, folder = sys.argv[1:3]\n"
    "sys.argv = sys.argv[:1]\n"
    "os.makedirs(folder, exist_ok=True)\n"
    "os.chdir(folder)\n"
    "os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'] = 'localhost', '12355'\n"
    "import torch\n"
    "from phalanx import Fabric\n"
    "fabric = Fabric('cpu', 'ddp', devices=2)\n"
    "fabric.launch()\n"
    "flags = sys.flags.optimize, 'utf8' in sys._xoptions, sys.stdin.read()\n"
    "everyone = fabric.world.all_gather_object((width, os.getcwd(), *flags))\n"
    "if fabric.is_global_zero: print(everyone)\n"
)


@pytest.mark.parametrize("start", ["script", "absolute path", "module"])
def test_ranks_have_the_arguments_and_the_folder_of_the_start(tmp_path: Path, start: str) -> None:
    script, package = tmp_path / "train.py", tmp_path / "package"
    script.write_text(CHANGED)
    if start == "module":
        # Of a package, with the interpreter's own options.
        package.mkdir()
        (package / "part.py").write_text("VALUE = 'relative'")
        (package / "__main__.py").write_text("from . import part\n" + CHANGED)
        options = ["-O", "-X", "utf8", "-W", "ignore", "-m", "package"]
        done = run_command([sys.executable, *options, "a b", "out"], tmp_path)
    elif start == "script":
        done = run_command([sys.executable, "train.py", "a b", "out"], tmp_path)
    else:
        done = run_script(script, "a b", "out", cwd=tmp_path)
    flags = (1, True) if start == "module" else (0, False)
    assert done.stdout.splitlines()[-1] == str([("a b", str(tmp_path / "out"), *flags, "")] * 2), done.stdout
    assert done.returncode == 0
