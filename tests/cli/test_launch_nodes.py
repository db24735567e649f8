"""``phalanx launch`` on two nodes: losses, restarts, and the end of all nodes after the end of one."""

from __future__ import annotations

import py_compile
import signal
import socket
import subprocess
from pathlib import Path

import launched_fit
import pytest
import torch
from called_command import CalledCommand
from launched_nodes import RANK, outcome, several_nodes, started
from ranks import session_pids, wait_until

FIT = Path(launched_fit.__file__)


@pytest.fixture
def rank_script(tmp_path: Path) -> Path:
    """Of byte code: no rank is forked, and torch is imported for none."""
    (tmp_path / "rank.py").write_text(RANK)
    py_compile.compile(str(tmp_path / "rank.py"), str(tmp_path / "rank.pyc"), doraise=True)
    return tmp_path / "rank.pyc"


def test_two_nodes_train_to_the_losses_of_one_process_though_all_start_again(tmp_path: Path) -> None:
    # Steps 0 to 2 are trained, and the restart resumes from the checkpoint of step 2.
    with several_nodes(2, "--max-restarts", "1", str(FIT), str(tmp_path), "kill", "1", "3") as nodes:
        codes, printed = outcome(nodes)
    assert codes == [0, 0], printed
    both = zip(*(launched_fit.recorded(tmp_path, rank).items() for rank in range(2)), strict=True)
    mean = [(first + second) / 2 for (_, first), (_, second) in both]
    torch.testing.assert_close(mean, launched_fit.by_hand())
    assert "was killed by SIGKILL at step 3 (epoch 0, batch 3)" in printed[1]
    assert "node 1: rank 1" in printed[0]
    assert all("(restart 1 of 1)" in text for text in printed)
    lines = (tmp_path / "losses_0.jsonl").read_text().splitlines()
    assert len(lines) == launched_fit.STEPS + 2


def test_an_error_on_one_node_is_named_on_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with several_nodes(2, str(FIT), str(tmp_path), "raise", "1", "3") as nodes:
        codes, printed = outcome(nodes)
    assert codes == [1, 1], printed
    assert printed[1].endswith("ValueError: planted\n")
    # The node of rank 0, whose report it is, also says how the run is resumed.
    reason, resuming = printed[0].splitlines()[-2:]
    assert reason.startswith("node 1: rank 1 (pid ")
    assert reason.endswith(" failed at step 3 (epoch 0, batch 3): ValueError: planted")
    assert resuming.startswith("phalanx: 1 step is lost: epoch=0-step=2.ckpt (step 2) is good. To resume: ")
    # The report is that of rank 0, on the other node.
    assert f"exit code 1: {reason}\n" in CalledCommand("why", capsys)(tmp_path).out


def test_a_configuration_error_on_one_task_of_slurm_ends_all_and_is_not_restarted(
    tmp_path: Path, rank_script: Path
) -> None:
    arguments = ["--max-restarts", "3", str(rank_script), str(tmp_path), "refuse", "1", "--lr", "0.1"]
    with several_nodes(2, *arguments, as_tasks=True) as nodes:
        codes, printed = outcome(nodes)
    assert codes == [78, 78], printed
    assert started(tmp_path) == {
        f"rank_{rank}_0": [str(rank), "2", "0", "1", str(rank), "2", "--lr", "0.1"] for rank in (0, 1)
    }
    assert not list(tmp_path.glob("end_of_rank_*"))


def test_a_signal_to_one_node_preempts_all(tmp_path: Path) -> None:
    recorded = tmp_path / "losses_1.jsonl"
    with several_nodes(2, "--max-restarts", "3", str(FIT), str(tmp_path), "long") as nodes:
        wait_until(lambda: recorded.exists() and recorded.read_text().count("\n") > 3, seconds=90.0)
        nodes[1].send_signal(signal.SIGTERM)
        codes, printed = outcome(nodes)
    assert codes == [75, 75], printed
    assert all("rank 1 got SIGTERM: stopped after optimizer step" in text for text in printed)
    assert len(list(tmp_path.rglob("preempted.ckpt"))) == 1


def test_a_rank_that_leaves_alone_ends_all_in_time(tmp_path: Path, rank_script: Path) -> None:
    """As one that is preempted before it has met the others, which would wait for it."""
    with several_nodes(2, "--max-restarts", "3", str(rank_script), str(tmp_path), "leave", "1") as nodes:
        codes, printed = outcome(nodes)
    assert codes == [75, 75], printed
    assert list(started(tmp_path)) == ["rank_0_0", "rank_1_0"]
    assert not list(tmp_path.glob("end_of_rank_*"))


@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_that_is_gone_ends_the_other_with_one_sentence(tmp_path: Path, rank_script: Path, killed: int) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    arguments = ["--max-restarts", "3", str(rank_script), str(tmp_path), "wait", "-"]
    # Where the store is gone, torch has much to say: the command silences it before it imports torch.
    with several_nodes(2, *arguments, temporary=temporary, new=[1] if killed == 0 else []) as nodes:
        wait_until(lambda: len(started(tmp_path)) == 2, seconds=90.0)
        nodes[killed].kill()
        codes, printed = outcome(nodes)
    assert (codes[killed], codes[1 - killed]) == (-signal.SIGKILL, 1), printed
    where = f"at {_address(nodes[0])}" if killed == 0 else f"({socket.gethostname()})"
    text = f"phalanx: node {killed} {where} does not answer: its launcher or its host has ended, or cannot be reached\n"
    assert printed[1 - killed] == text
    assert not any(session_pids(node.pid) for node in nodes)


def _address(node: subprocess.Popen[str]) -> str:
    arguments = [str(each) for each in node.args] if isinstance(node.args, list) else []
    return arguments[arguments.index("--rdzv") + 1]
