"""``phalanx launch`` after the loss of a node: a spare takes its place, or fewer ranks go on; else the run ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import py_compile
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import host_run
import pytest
import torch
from launched_nodes import LAUNCH, RANK, outcome, several_nodes, started
from ranks import run_on_ranks, session_pids, started_script, wait_until
from two_hosts import ended, reason_against, two_hosts

SCRIPT = Path(host_run.__file__)
STEPS = 40
GONE = r"phalanx: node {} \(\S+\) does not answer: its launcher or its host has ended, or cannot be reached"


@pytest.fixture
def rank_script(tmp_path: Path) -> Path:
    """Of byte code: no rank is forked, and torch is imported for none."""
    (tmp_path / "rank.py").write_text(RANK)
    py_compile.compile(str(tmp_path / "rank.py"), str(tmp_path / "rank.pyc"), doraise=True)
    return tmp_path / "rank.pyc"


def arguments(folder: Path, samples: int = 0, strategy: str = "ddp", steps: int = STEPS) -> list[str]:
    return [str(SCRIPT), str(folder), strategy, "0", "1", str(steps), "0.05", str(samples)]


def undisturbed(
    folder: Path, ranks: int, samples: int = 0, strategy: str = "ddp", steps: int = STEPS
) -> dict[str, Any]:
    """Return the weights of the same run, on ranks of one node."""
    folder.mkdir()
    run_on_ranks(ranks, host_run.main, folder, strategy, ranks, 1, steps, 0.0, float(samples), timeout=60.0)
    return weights(folder)


def weights(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "weights.pt")
    return found


def has_saved(folder: Path, step: int) -> bool:
    return any(folder.glob(f"phalanx_logs/*/checkpoints/*step={step}.ckpt"))


def sizes(folder: Path) -> list[int]:
    """Return the number of ranks of each optimizer step, of those done again the last."""
    lines = (folder / "losses_0.jsonl").read_text().splitlines()
    return list({step: size for step, _, size, _ in map(json.loads, lines)}.values())


def address_of(node: subprocess.Popen[str]) -> str:
    """Return the value of ``--rdzv``."""
    given = [str(each) for each in node.args] if isinstance(node.args, list) else []
    return given[given.index("--rdzv") + 1]


def another_launcher(
    first: subprocess.Popen[str], number: int, arguments: list[str], temporary: Path
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Start another launcher of a run on two nodes with a spare, of which ``first`` is node 0."""
    options = ["-n", "1", "--nodes", "2", "--spares", "1", "--node-rank", str(number), "--rdzv", address_of(first)]
    return started_script(LAUNCH, *options, *arguments, env={"TMPDIR": str(temporary)})


def again(*numbers: int) -> str:
    return (
        "phalanx: the ranks are started again on " + ", ".join(rf"node {number} \(\S+\)" for number in numbers) + "\n"
    )


def kill(node: subprocess.Popen[str]) -> None:
    """Kill a launcher; the kernel kills its ranks."""
    node.kill()
    node.wait()


@pytest.mark.timeout(240)
def test_a_spare_takes_the_place_of_a_lost_node_and_no_bit_changes(tmp_path: Path) -> None:
    folder = tmp_path / "lost"
    folder.mkdir()
    with several_nodes(3, "--spares", "1", *arguments(folder), nodes="2", temporary=tmp_path) as nodes:
        wait_until(lambda: has_saved(folder, 8), seconds=90.0)
        kill(nodes[1])
        codes, printed = outcome(nodes)
        left = [session_pids(node.pid) for node in nodes]
    assert codes == [0, -signal.SIGKILL, 0], printed
    assert left == [set(), set(), set()]
    assert "phalanx: node 2 waits, and takes part in the run if another one is lost\n" in printed[2]
    assert re.search(GONE.format(1) + "\n" + again(0, 2), printed[0]), printed[0]
    assert re.search(again(0, 2), printed[2]), printed[2]
    torch.testing.assert_close(weights(folder), undisturbed(tmp_path / "whole", 2), rtol=0.0, atol=0.0)


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)[0] for line in (folder / "losses_0.jsonl").read_text().splitlines()]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lost", [[1], [1, 2]])
def test_nodes_have_the_state_of_a_lost_one_in_memory_unless_its_neighbour_is_lost_too(
    tmp_path: Path, lost: list[int]
) -> None:
    folder = tmp_path / "lost"
    folder.mkdir()
    given = ["--spares", "2", *arguments(folder, strategy="fsdp")]
    with several_nodes(5, *given, nodes="3", temporary=tmp_path) as nodes:
        wait_until(lambda: has_saved(folder, 8), seconds=90.0)
        for number in lost:
            nodes[number].kill()
        checkpoints = next(folder.glob("phalanx_logs/*/checkpoints"))
        checkpoints.rename(tmp_path / "moved")
        codes, printed = outcome(nodes)
    assert codes == [-signal.SIGKILL if number in lost else 0 for number in range(5)], printed
    again = [after for before, after in itertools.pairwise(steps_of(folder)) if after <= before]
    assert (again == [0]) == (len(lost) == 2), again
    assert ("is on none of the nodes" in printed[0]) == (len(lost) == 2), printed[0]
    whole = undisturbed(tmp_path / "whole", 3, strategy="fsdp")
    torch.testing.assert_close(weights(folder), whole, rtol=0.0, atol=0.0)


@pytest.mark.timeout(240)
def test_a_spare_that_has_not_come_yet_is_waited_for_and_is_replaced_if_it_is_lost_too(
    tmp_path: Path, rank_script: Path
) -> None:
    """It is lost as the ranks start again; the launcher of the first lost node, started again, takes its place."""
    arguments = [str(rank_script), str(tmp_path), "wait", "-"]
    with several_nodes(2, "--spares", "1", *arguments, nodes="2", temporary=tmp_path) as nodes:
        wait_until(lambda: len(started(tmp_path)) == 2, seconds=90.0)
        kill(nodes[1])
        # The loss is seen after eight seconds.
        with contextlib.suppress(subprocess.TimeoutExpired):
            nodes[0].wait(11.0)
        with another_launcher(nodes[0], 2, arguments, tmp_path) as spare:
            wait_until(lambda: "rank_1_1" in started(tmp_path), seconds=90.0)
            with another_launcher(nodes[0], 1, arguments, tmp_path) as replacement:
                kill(spare)
                wait_until(lambda: "rank_1_2" in started(tmp_path), seconds=90.0)
                nodes[0].send_signal(signal.SIGTERM)
                codes, printed = outcome([nodes[0], replacement])
    assert codes == [75, 75], printed
    assert re.search(GONE.format(1) + "(?s:.*)" + again(0, 2), printed[0]), printed[0]
    assert re.search(GONE.format(2) + "\n" + again(0, 1), printed[0]), printed[0]


@pytest.mark.timeout(240)
def test_fewer_ranks_go_on_with_the_same_global_batch_and_more_once_a_node_has_come(tmp_path: Path) -> None:
    folder = tmp_path / "lost"
    folder.mkdir()
    given = arguments(folder, samples=8, steps=400)
    with several_nodes(2, *given, nodes="1:2", temporary=tmp_path) as nodes:
        wait_until(lambda: has_saved(folder, 8), seconds=90.0)
        kill(nodes[1])
        wait_until(lambda: sizes(folder)[-1] == 1, seconds=90.0)
        options = ["-n", "1", "--nodes", "1:2", "--node-rank", "1", "--rdzv", address_of(nodes[0])]
        with started_script(LAUNCH, *options, *given, env={"GLOO_SOCKET_IFNAME": "lo"}) as replacement:
            wait_until(lambda: sizes(folder)[-1] == 2, seconds=90.0)
            (folder / host_run.ENOUGH).touch()
            codes, printed = outcome([nodes[0], replacement])
    assert codes == [0, 0], printed
    assert re.search(GONE.format(1) + "\n" + again(0), printed[0]), printed[0]
    # What was interrupted as the node came back was saved.
    saved = r"phalanx: a node has come, and the ranks have saved their step\n"
    assert re.search(saved + again(0, 1), printed[0]), printed[0]
    steps = len(sizes(folder))
    torch.testing.assert_close(weights(folder), undisturbed(tmp_path / "whole", 1, samples=8, steps=steps))


def test_a_run_without_a_global_batch_size_is_not_started_on_a_varying_number_of_nodes(tmp_path: Path) -> None:
    with several_nodes(2, *arguments(tmp_path), nodes="1:2") as nodes:
        codes, printed = outcome(nodes)
    assert codes == [78, 78], printed
    assert "give Trainer(global_batch_size=...)" in printed[0]


@pytest.mark.timeout(240)
def test_after_a_cut_cable_one_host_goes_on_and_the_other_ends(tmp_path: Path) -> None:
    if reason := reason_against():
        pytest.skip(reason)
    folder = tmp_path / "lost"
    folder.mkdir()
    launcher = tmp_path / "launch.py"
    launcher.write_text(LAUNCH)
    with two_hosts() as hosts:
        nodes = hosts.start_launched(launcher, SCRIPT, arguments(folder, samples=8)[1:], folder, nodes="1:2")
        wait_until(lambda: has_saved(folder, 8), seconds=90.0)
        hosts.cut()
        codes = ended(nodes, 90.0)
    assert codes == [0, 1]
    assert re.search(GONE.format(1), (folder / "host_0.txt").read_text())
    torch.testing.assert_close(weights(folder), undisturbed(tmp_path / "whole", 1, samples=8))
