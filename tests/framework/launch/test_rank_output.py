"""Output of ranks: rank 0's on the screen, all of it in files, and a failure in a few lines."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_script import MODEL
from ranks import read_terminal, run_script, session_pids, started_script, wait_until
from torch import nn
from torch.utils.data import DataLoader, Dataset

from phalanx.framework.launch.rank_output import RankOutput
from phalanx.framework.system.failure_records import MOST_LINES, brief_traceback

SCRIPT = f"""{MODEL}
root, what, workers = sys.argv[1:]

class Writing(Model):
    def training_step(self, batch, index):
        if index == 1:
            print("hello of", self.global_rank)
            os.write(2, b"from C %d\\n" % self.global_rank)
        if index == 3 and self.global_rank == 1:
            if what == "crash":
                print("the last of it")
                os.kill(os.getpid(), signal.SIGSEGV)
            if what == "bug":
                return nn.Linear(3, 1)(batch[0]).mean()  # the planted line
        if what == "long":
            time.sleep(0.05)
        return super().training_step(batch, index)

if __name__ == "__main__":
    trainer = Trainer(
        strategy="ddp", devices=2, accelerator="cpu", max_epochs=1, default_root_dir=root, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Writing(), loader(800, num_workers=int(workers)))
"""


def files(root: Path) -> list[str]:
    (folder,) = root.rglob("ranks")
    return [(folder / f"rank_{rank}.log").read_text() for rank in range(2)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("what", ["crash", "bug"])
def test_the_screen_shows_rank_0_and_the_failure(tmp_path: Path, what: str) -> None:
    done = run_script(SCRIPT, str(tmp_path), what, "0", timeout=150.0)
    lines = done.stdout.splitlines()
    assert "hello of 0" in lines
    assert "from C 0" in lines
    assert "hello of 1" not in lines
    first, second = files(tmp_path)
    assert first.startswith("--- attempt 1, begun ")
    assert "hello of 0" in first
    assert "hello of 1\nfrom C 1\n" in second
    assert sum(line.startswith("phalanx: the output of all ranks is in ") for line in lines) == 1
    (report,) = tmp_path.rglob("report.json")
    shown = json.loads(report.read_text())
    assert shown["exit_code"] == done.returncode
    *_, message, advice = lines
    assert shown["stopped"].splitlines()[-1] == message
    assert advice.startswith("phalanx: all 3 steps are lost: there is no checkpoint. To start again: ")
    if what == "crash":
        assert done.returncode == 128 + signal.SIGSEGV
        assert message.startswith("rank 1 (pid ")
        assert message.endswith("was killed by SIGSEGV at step 3 (epoch 0, batch 3)")
        assert "[rank 1] the last of it" in lines
        assert "Traceback" not in done.stdout
        return
    assert done.returncode == 1
    assert len(lines) <= 40
    assert done.stdout.count("Traceback") == 1
    place = next(number for number, line in enumerate(lines) if "# the planted line" in line)
    assert len(lines) - place <= 15
    assert lines[place - 1].strip().startswith('File "')
    assert "in training_step" in lines[place - 1]
    assert "mat1 and mat2 shapes cannot be multiplied" in message
    # The full traceback is in the file.
    assert "framework/loop/fit_loop.py" in second
    assert "framework/loop/fit_loop.py" not in done.stdout


@pytest.mark.timeout(240)
def test_workers_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with started_script(SCRIPT, str(tmp_path), "long", "2", env={"TMPDIR": str(tmp_path)}) as process:
        # Each worker has returned a batch, so it is set to end with its rank.
        wait_until(
            lambda: (
                sum("hello of" in path.read_text() for path in tmp_path.glob("phalanx_logs/*/ranks/rank_*.log")) == 2
            ),
            seconds=150.0,
        )
        assert len(session_pids(process.pid)) >= 7
        process.kill()
        process.wait()
        wait_until(lambda: not session_pids(process.pid), seconds=2.0)


def pump(directory: Path | None, commands: list[str], find: Callable[[], Path | None] | None = None) -> RankOutput:
    """Run a shell for each command, each printing as a rank would."""
    with RankOutput(find or (lambda: directory), "a start") as output:
        processes = []
        for rank, command in enumerate(commands):
            with output.streams(rank) as (stdout, stderr):
                processes.append(subprocess.Popen(["sh", "-c", command], stdout=stdout, stderr=stderr))
        for process in processes:
            process.wait()
    output.close()
    return output


def test_output_before_the_directory_exists_is_in_the_file(tmp_path: Path) -> None:
    later = tmp_path / "run"
    find = iter([None, None])
    output = pump(
        None,
        ["echo zero", f"echo one; sleep 0.3; mkdir {later}; sleep 0.5; echo two"],
        lambda: next(find, later),
    )
    assert output.folder == later / "ranks"
    assert (later / "ranks" / "rank_1.log").read_text() == "--- a start\none\ntwo\n"
    pump(later, ["true", "echo three"])
    assert (later / "ranks" / "rank_1.log").read_text() == "--- a start\none\ntwo\n--- a start\nthree\n"


def test_without_a_directory_only_the_last_lines_are_held(tmp_path: Path) -> None:
    output = pump(None, ["true", "seq 5000"])
    assert output.tail(1, 2) == ["4999", "5000"]
    assert output.folder is None
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_a_rank_left_running_is_not_waited_for(tmp_path: Path) -> None:
    output = pump(tmp_path, ["true", "echo done; sleep 30 & echo $! > pid"])
    assert output.tail(1, 5) == ["done"]
    left = Path("pid")
    os.kill(int(left.read_text()), signal.SIGKILL)
    left.unlink()


def test_lines_that_are_written_in_parts_are_not_mixed() -> None:
    source = (
        "import os, time\n"
        "from phalanx.framework.launch.rank_output import RankOutput\n"
        "with RankOutput(lambda: None, 'a start', shows_all=True) as output:\n"
        "    with output.streams(0) as (zero, _), output.streams(1) as (one, _):\n"
        "        parts = (zero, b'met'), (one, b'also '), (one, b'met\\n'), (zero, b'\\n'), (zero, b'> ')\n"
        "        for stream, part in parts:\n"
        "            os.write(stream, part)\n"
        "            time.sleep(0.01)\n"
        "        time.sleep(0.5)\n"
        "        os.write(zero, b'typed\\n')\n"
    )
    child = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert child.stdout is not None
    with child, child.stdout:
        shown = b""
        while not shown.endswith(b"> "):
            shown += os.read(child.stdout.fileno(), 100) or b"> the end> "
        assert sorted(shown.splitlines()) == [b"> ", b"[rank 1] also met", b"met"]
        assert child.stdout.read() == b"typed\n"


def test_rank_0_has_a_terminal_where_there_is_one() -> None:
    source = (
        "import sys, os\n"
        "from phalanx.framework.launch.rank_output import RankOutput\n"
        "import subprocess\n"
        "told = 'import os, sys; print(sys.stdout.isatty(), os.get_terminal_size()[:])'\n"
        "with RankOutput(lambda: None, '') as output:\n"
        "    for rank in range(2):\n"
        "        with output.streams(rank) as (out, err):\n"
        "            subprocess.run([sys.executable, '-c', told], stdout=out, stderr=err)\n"
    )
    reading, writing = os.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 97, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.DEVNULL, stdout=writing, stderr=writing)
    os.close(writing)
    printed = read_terminal(reading)
    assert process.wait() == 0
    assert printed == "True (97, 31)\r\n"


def fail_deep(depth: int) -> None:
    if depth:
        fail_deep(depth - 1)
    else:
        nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 4))(__import__("torch").ones(1, 3))


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise KeyError("a broken sample")  # the planted line


def read_broken() -> None:
    iterator = iter(DataLoader(Broken(), num_workers=1))
    try:
        next(iterator)
    finally:
        iterator._shutdown_workers()  # type: ignore[attr-defined]


def caught(function: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as info:  # noqa: PT011
        function()
    return info.value


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda: fail_deep(2), "nn.Sequential("),
        (read_broken, "# the planted line"),
        (lambda: exec("raise ValueError('x\\n' * 500)"), 'File "<string>"'),
    ],
    ids=["torch", "worker", "long message"],
)
def test_a_brief_traceback_has_the_users_line_near_its_end(function: Callable[[], object], wanted: str) -> None:
    lines = brief_traceback(caught(function)).splitlines()
    assert len(lines) <= MOST_LINES
    assert any(wanted in line for line in lines[-15:])


def test_the_middle_of_a_chain_of_errors_is_left_out() -> None:
    def chain() -> None:
        error: Exception | None = None
        for number in range(30):
            try:
                raise ValueError(str(number)) from error
            except ValueError as raised:
                error = raised
        assert error is not None
        raise error

    lines = brief_traceback(caught(chain)).splitlines()
    assert len(lines) == MOST_LINES
    assert lines[-1] == "ValueError: 29"


def test_a_screen_that_is_not_read_is_noticed() -> None:
    source = (
        "import os, subprocess, sys, threading, time\n"
        "from phalanx.framework.launch.rank_output import RankOutput\n"
        "reading, screen = os.pipe()\n"
        "told = os.dup(2)\n"
        "os.dup2(screen, 1); os.dup2(screen, 2)\n"
        "with RankOutput(lambda: None, 'a start') as output:\n"
        "    with output.streams(0) as (stdout, _):\n"
        "        rank = subprocess.Popen([sys.executable, '-c', 'print(\"x\" * 300000)'], stdout=stdout)\n"
        "    while not output.is_blocked(): time.sleep(0.02)\n"
        "    read = lambda: [None for _ in iter(lambda: os.read(reading, 65536), b'')]\n"
        "    threading.Thread(target=read, daemon=True).start()\n"
        "    while output.is_blocked(): time.sleep(0.02)\n"
        "    os.write(told, b'goes on %d' % rank.wait())\n"
    )
    assert run_script(source).stdout.endswith("goes on 0")
