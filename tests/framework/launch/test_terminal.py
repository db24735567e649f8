"""A run in a terminal: Ctrl-C reaches the launcher, the ranks and their workers at once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_script import MODEL
from ranks import end_session, run_script, warm_python
from screens import screen_of

CTRL_C = b"\x03"
HIDES_CURSOR, SHOWS_CURSOR = "\x1b[?25l", "\x1b[?25h"
# What the process that starts the ranks does first: its standard output is the terminal.
TAKES_TERMINAL = """
import fcntl, os, termios
if "RANK" not in os.environ:
    os.dup2(1, 0)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
"""
SCRIPT = f"""{MODEL}
root, seconds = sys.argv[1:]

class Slow(Model):
    def training_step(self, batch, index):
        if self.global_step == 2 and self.global_rank == 0:
            print("AT STEP 2", flush=True)
        if self.global_step >= 2:
            time.sleep(float(seconds))
        return super().training_step(batch, index)

if __name__ == "__main__":
    trainer = Trainer(devices=RANKS, accelerator="cpu", max_epochs=1, default_root_dir=root, logger=False)
    trainer.fit(Slow(), loader(64, 1, num_workers=1))
"""


# Every rank reaches the breakpoint.
DEBUGGED = (
    SCRIPT.replace("RANKS", "2")
    .replace(
        """        if self.global_step >= 2:
            time.sleep(float(seconds))
""",
        """        answer = 41
        if self.global_step == 2:
            breakpoint()
            print("ANSWER", answer, "ON", self.global_rank, flush=True)
""",
    )
    .replace("default_root_dir=root", "default_root_dir=root, verbose=False, stall_timeout=float(seconds)")
)


@contextlib.contextmanager
def in_terminal(root: Path, source: str, seconds: float) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a script in a terminal of its own; yield its process and the other end of the terminal."""
    script = root / "script.py"
    script.write_text(TAKES_TERMINAL + source)
    terminal, inside = pty.openpty()
    process = warm_python().start(script, [str(root), str(seconds)], root, os.environ, inside)
    os.close(inside)
    try:
        yield process, terminal
    finally:
        end_session(process.pid)
        process.wait()
        os.close(terminal)


def run_in_terminal(
    root: Path, seconds: float, *pauses: float, ranks: int = 2, awaited: bytes = b"AT STEP 2"
) -> tuple[int, str, float]:
    """Run the script, whose steps last so long from the third on; press Ctrl-C from some output on, after each pause.

    Return its exit code, what the terminal showed, and how long it took from the last press to its end.
    """
    with in_terminal(root, SCRIPT.replace("RANKS", str(ranks)), seconds) as (process, terminal):
        shown = read_until(terminal, awaited)
        pressed = time.monotonic()
        for pause in pauses:
            time.sleep(pause)
            os.write(terminal, CTRL_C)
            pressed = time.monotonic()
        shown += read_until(terminal, None)
        code = process.wait(30.0)
        return code, shown.decode(errors="replace"), time.monotonic() - pressed


def read_until(terminal: int, text: bytes | None, seconds: float = 60.0) -> bytes:
    """Return what is shown up to some text; with None until nobody is left who could write."""
    shown, until = b"", time.monotonic() + seconds
    # Of a terminal that nobody has open any more, reading is an error.
    with contextlib.suppress(OSError):
        while text is None or text not in shown:
            assert time.monotonic() < until, shown.decode(errors="replace")
            if select.select([terminal], [], [], 0.5)[0]:
                shown += os.read(terminal, 1 << 16)
    return shown


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_finishes_the_step_saves_and_ends_with_one_line(ranks: int, tmp_path: Path) -> None:
    # The bar hides the cursor when it is first drawn, which may be after the third step.
    code, shown, _ = run_in_terminal(tmp_path, 0.05, 0.0, ranks=ranks, awaited=HIDES_CURSOR.encode())
    # A shell reports 130 for a process that ends by this signal, too.
    assert code == (130 if ranks > 1 else -signal.SIGINT), shown
    assert "Traceback" not in shown
    assert shown.rfind(SHOWS_CURSOR) > shown.rfind(HIDES_CURSOR) >= 0
    (checkpoint,) = tmp_path.rglob("preempted.ckpt")
    *_, last = (line for line in screen_of(shown) if line)
    assert "SIGINT" in last
    assert str(checkpoint.relative_to(tmp_path)) in last
    assert shown.count("stopped after optimizer step") == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_ctrl_c_does_not_wait_for_the_step(ranks: int, tmp_path: Path) -> None:
    code, shown, seconds = run_in_terminal(tmp_path, 20.0, 0.2, 1.5, ranks=ranks)
    assert code == (130 if ranks > 1 else -signal.SIGINT), shown
    *_, last = (line for line in screen_of(shown) if line)
    assert last.endswith("interrupted")
    assert "Traceback" not in shown
    # Its step would take as long again, and more.
    assert seconds < 12.0
    assert not list(tmp_path.rglob("preempted.ckpt"))


def test_a_breakpoint_stops_rank_0_in_the_terminal_for_longer_than_a_stall_may_last(tmp_path: Path) -> None:
    with in_terminal(tmp_path, DEBUGGED, 1.0) as (process, terminal):
        shown = read_until(terminal, b"(Pdb) ")
        time.sleep(3.0)
        os.write(terminal, b"answer += 1\n")
        shown += read_until(terminal, b"(Pdb) ")
        os.write(terminal, b"c\n")
        shown += read_until(terminal, None)
        assert process.wait(30.0) == 0, shown.decode(errors="replace")
    assert b"ANSWER 42 ON 0" in shown
    # On the other rank the breakpoint had no effect.
    (file,) = tmp_path.rglob("rank_1.log")
    assert "ANSWER 41 ON 1" in file.read_text()


# Rank 0 waits for its terminal to become narrower.
RESIZED = """
import subprocess, sys
from phalanx.framework.launch.rank_output import RankOutput
rank = (
    "import os, time; until = time.monotonic() + 30; print('READY', flush=True)\\n"
    "while os.get_terminal_size().columns != 55 and time.monotonic() < until: time.sleep(0.01)\\n"
    "print(os.get_terminal_size().columns, 'COLUMNS')"
)
with RankOutput(lambda: None, "") as output, output.streams(0) as (out, err):
    subprocess.run([sys.executable, "-c", rank], stdout=out, stderr=err)
"""


def test_the_terminal_of_rank_0_follows_a_new_size(tmp_path: Path) -> None:
    with in_terminal(tmp_path, RESIZED, 0.0) as (process, terminal):
        shown = read_until(terminal, b"READY")
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 55, 0, 0))
        shown += read_until(terminal, None)
        assert process.wait(30.0) == 0, shown
    assert b"55 COLUMNS" in shown


# A live bar without a run, which needs no torch.
WITH_BAR = """
from phalanx.callbacks.progress_screens import Frame, Live

bar, frame = Live(0.1), Frame("epoch 0", 10, 0.0, 0, 0.0, 0)
bar.draw(frame, [])
ENTRY
print("STEPPED", flush=True)
bar.draw(frame, [])
print("ABOVE", flush=True)
bar.draw(frame, [])
bar.close()
"""
BAR, ERASED = "━", "\x1b[1A\x1b[2K"
# Readline may switch the terminal's mode before the prompt.
PROMPT = re.compile(r"\n(\x1b\[[?0-9]*[a-z]|\r)*\(Pdb\) $")


@pytest.mark.parametrize("entry", ["breakpoint()", "__import__('pdb').set_trace()"])
def test_the_progress_bar_is_not_drawn_while_a_debugger_has_the_terminal(tmp_path: Path, entry: str) -> None:
    with in_terminal(tmp_path, WITH_BAR.replace("ENTRY", entry), 0.0) as (process, terminal):
        stopped = read_until(terminal, b"(Pdb) ").decode()
        if sys.version_info >= (3, 13):
            # The debugger is at the line that called it, no longer at the next one.
            os.write(terminal, b"n\n")
            stopped += read_until(terminal, b"(Pdb) ").decode()
        os.write(terminal, b"n\n")
        printed = read_until(terminal, b"(Pdb) ").decode()
        os.write(terminal, b"n\n")
        stepped = read_until(terminal, b"(Pdb) ").decode()
        os.write(terminal, b"c\n")
        after = read_until(terminal, None).decode()
        assert process.wait(30.0) == 0, after
    assert PROMPT.search(stopped), stopped
    last = stopped[stopped.rindex(BAR) :]
    assert 0 < last.index(SHOWS_CURSOR) < last.index(ERASED) < last.index("-> print")
    assert "STEPPED" in printed
    assert "-> print" in stepped
    assert BAR not in printed + stepped
    assert PROMPT.search(stepped), stepped
    assert BAR in after[after.index("ABOVE") :]


def test_a_debugger_reads_commands_from_a_pipe(tmp_path: Path) -> None:
    reads = """
import os
if "RANK" not in os.environ:
    reading, writing = os.pipe()
    os.write(writing, b'answer += 2\\nc\\n')
    os.close(writing)
    os.dup2(reading, 0)
"""
    done = run_script(reads + DEBUGGED, str(tmp_path), "60")
    assert done.returncode == 0, done.stdout
    assert "ANSWER 43 ON 0" in done.stdout
