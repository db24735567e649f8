"""Ranks of a script are forked from a process that has imported torch once, and behave as if started on their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_command, run_script, session_pids, started_script, wait_until

import phalanx
from phalanx.framework.launch.fork_server import ForkServer, ServerGone
from phalanx.framework.launch.fork_server_main import NAME
from phalanx.framework.system.entry_script import Script

HEAD = """
import os, random, sys, time
import torch
from phalanx.framework.launch.exit_hooks import install_rank_hooks
from phalanx.framework.launch.script_launcher import launch_script
from phalanx.framework.distributed.world import World, placement

place = placement()
def launch(restarts=0, libraries=("torch._dynamo",), ranks=2):
    if place.launcher is None:
        launch_script(ranks, restarts, libraries=libraries)
    install_rank_hooks(place)
"""


def servers(session: int) -> list[int]:
    """Return the processes of a session that ranks are forked from."""
    return [pid for pid in session_pids(session) if name_of(pid) == NAME]


def name_of(pid: int) -> bytes | None:
    """Return the name of a process; None if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_bytes().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None


def test_a_forked_rank_is_like_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("used = []")
    (tmp_path / "chatty.py").write_text("print('hello')")
    # As torchmetrics does.
    (tmp_path / "reads_rank.py").write_text("import os\nrank = os.environ.get('RANK')")
    # The folder that a link points to is not searched for modules.
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "phalanx").symlink_to(Path(phalanx.__file__).resolve().parent)
    script = tmp_path / "script.py"
    script.write_text(
        "import contextlib, helper, multiprocessing, numpy.random, reads_rank\nhelper.used.append(1)\n"
        + HEAD
        + "sys.path.append('/nowhere')\n"
        + "def double(number): return 2 * number\n"
        + "if __name__ == '__main__':\n"
        + "    launch(libraries=['torch._dynamo', 'chatty'])\n"
        + "    here = sys.modules['__main__']\n"
        # On one rank, as a process that is spawned imports torch again.
        + "    spawn = multiprocessing.get_context('spawn')\n"
        + "    with spawn.Pool(1) if place.rank else contextlib.nullcontext() as pool:\n"
        + "        four = pool.map(double, [2])[0] if pool else 4\n"
        + "    print('seen', len(helper.used), os.path.basename(here.__file__), here.__spec__, here.double is double,\n"
        + "          four, sys.argv[0] == here.__file__, sys.path[0] == sys.argv[1], sys.path.count('/nowhere'),\n"
        + "          any(path.endswith('framework') for path in sys.path), 'torch._dynamo' in sys.modules,\n"
        + "          sys.stdin.read() == '', open('/proc/self/comm').read().startswith('python'), flush=True)\n"
        # A library that reads its rank while it is imported; and generators without a seed.
        + "    world = World.from_environment('cpu')\n"
        + "    drawn = world.all_gather_object((reads_rank.rank, random.random(), numpy.random.random()))\n"
        + "    numbers = {number for _, *both in drawn for number in both}\n"
        + "    if world.is_global_zero: print([rank for rank, *_ in drawn], len(numbers))\n"
    )
    environment = {"PYTHONPATH": str(linked), "PYTHONUNBUFFERED": ""}
    done = run_command([sys.executable, str(script), str(tmp_path)], tmp_path, env=environment)
    expected = "seen 1 script.py None True 4 True True 1 False True True True"
    assert sorted(done.stdout.splitlines()) == ["['0', '1'] 4", f"[rank 1] {expected}", "hello", expected], done.stdout


def test_a_traceback_has_no_frames_of_the_fork_server() -> None:
    # Settings of the script do not disturb the start either.
    own = "import signal, socket\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nsocket.setdefaulttimeout(0.01)\n"
    done = run_script(own + HEAD + "launch()\nsys.excepthook = sys.__excepthook__\nraise KeyError('the cause')\n")
    assert "KeyError: 'the cause'" in done.stdout
    assert "fork_server" not in done.stdout
    assert "ended with exit code 1" in done.stdout
    assert done.returncode == 1


def test_a_rank_that_is_interrupted_dies_of_the_signal() -> None:
    source = "launch()\nsys.excepthook = lambda *_: None\nif place.rank: time.sleep(60)\n"
    last = "import atexit\natexit.register(print, 'last words')\nraise KeyboardInterrupt\n"
    done = run_script(HEAD + source + last)
    assert "last words" in done.stdout
    assert "rank 0 (pid " in done.stdout.splitlines()[-1]
    assert done.stdout.splitlines()[-1].endswith("was killed by SIGINT")
    assert done.returncode == 128 + signal.SIGINT


def test_ranks_start_though_an_import_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os\nos._exit(3)")
    script = tmp_path / "script.py"
    script.write_text(
        HEAD + "launch(libraries=['deadly'])\nworld = World.from_environment('cpu')\nworld.barrier()\nprint('met')\n"
    )
    done = run_script(script, cwd=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["[rank 1] met", "met"], done.stdout
    assert done.returncode == 0


def test_a_killed_server_is_replaced_for_the_next_attempt(tmp_path: Path) -> None:
    source = HEAD + (
        "launch(restarts=1)\n"
        "from phalanx.framework.system.environment import attempt\n"
        "print('attempt', attempt(), flush=True)\n"
        "while not attempt(): time.sleep(0.02)\n"
    )
    with started_script(source, env={"TMPDIR": str(tmp_path)}) as process:
        assert process.stdout is not None
        begun = 0
        for line in process.stdout:
            begun += "attempt 0" in line
            if begun == 2:
                break
        # A rank has the name of the server until it has begun.
        wait_until(lambda: len(servers(process.pid)) == 1)
        (server,) = servers(process.pid)
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not servers(process.pid))
        ranks = session_pids(process.pid) - {process.pid}
        assert len(ranks) == 2
        os.kill(min(ranks), signal.SIGKILL)
        output = process.communicate(timeout=60)[0]
        assert output.count("attempt 1") == 2
        assert process.returncode == 0
        assert session_pids(process.pid) == set()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_signal_during_the_imports_of_the_server_ends_all(tmp_path: Path, signum: int, code: int) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(f"open({str(tmp_path / 'begun')!r}, 'w').close()\nimport time\ntime.sleep(3600)")
    source = f"import sys\nsys.path.append({str(tmp_path)!r})\n" + HEAD + "launch(libraries=['slow'])\n"
    with started_script(source, env={"TMPDIR": str(tmp_path)}) as process:
        wait_until((tmp_path / "begun").exists)
        process.send_signal(signum)
        process.communicate(timeout=60)
        assert process.returncode == code
        wait_until(lambda: not session_pids(process.pid))


# Has the name of CUDA's driver, and answers as it does before and after its initialization.
DRIVER = """
static int is_initialized;
int cuInit(unsigned flags) { is_initialized = 1; return 0; }
int cuDeviceGetCount(int *count) { return is_initialized ? 0 : 3; }
"""


@pytest.fixture
def special(tmp_path: Path) -> Path:
    """Make a module that loads a library which others take for CUDA's driver."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    library, source = tmp_path / "driver.so", tmp_path / "driver.c"
    source.write_text(DRIVER)
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    module = tmp_path / "special.py"
    module.write_text(f"import ctypes\ndriver = ctypes.CDLL({str(library)!r})\n")
    return module


def test_a_driver_that_is_loaded_prevents_forks_once_it_is_initialized(special: Path) -> None:
    source = (
        "from phalanx.framework.launch.fork_server_main import _prevents_forks\n"
        f"import sys\nsys.path.append({str(special.parent)!r})\nimport special\n"
        "before = _prevents_forks()\nspecial.driver.cuInit(0)\nprint(before, _prevents_forks())\n"
    )
    assert run_script(source).stdout == "False True\n"


def test_ranks_are_forked_without_libraries_that_initialize_an_accelerator(tmp_path: Path, special: Path) -> None:
    special.write_text(special.read_text() + "driver.cuInit(0)\n")
    script = tmp_path / "script.py"
    # Only in a forked rank are there objects that are excluded from garbage collection.
    script.write_text(
        HEAD + "launch(restarts=1, libraries=['special'])\nimport gc\n"
        "from phalanx.framework.system.environment import attempt\n"
        "print('forked', gc.get_freeze_count() > 0, 'special' in sys.modules, attempt(), flush=True)\n"
        # A rank that ends takes the other with it, so both print first.
        "open(os.environ['RANK'], 'w').close()\n"
        "while not (os.path.exists('0') and os.path.exists('1')): time.sleep(0.01)\n"
        "if not attempt(): os._exit(1)\n"
    )
    done = run_script(script, cwd=tmp_path)
    for line in (f"forked True False {number}" for number in (0, 1)):
        assert line in done.stdout
        assert f"[rank 1] {line}" in done.stdout
    assert done.returncode == 0


def test_a_server_that_cannot_fork_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Like a build with CUDA, which records in a forked process that a device was initialized.
    (tmp_path / "looks.py").write_text("import torch\ntorch.cuda._is_in_bad_fork = lambda: True")
    monkeypatch.syspath_prepend(str(tmp_path))
    script = Script([sys.executable], str(Path(__file__)), False, [])
    server = ForkServer(script, dict(os.environ), ["looks"])
    try:
        wait_until(server.is_ready_or_ended)
        assert server.is_spoiled
        for _ in range(2):
            with pytest.raises(ServerGone):
                server.fork({}, (0, 1, 2), {})
            assert server.is_alive()
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServerGone):
            server.fork({}, (0, 1, 2), {})
        wait_until(lambda: not server.is_alive())
        assert server.is_ready_or_ended()
    finally:
        server.close()
