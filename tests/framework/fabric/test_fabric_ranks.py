"""The rank verbs: gathering, reducing, splitting, waiting, agreeing, and starting the ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from ranks import run_on_ranks, run_script
from small_fits import Tiny, loader, quiet_trainer

from phalanx import Fabric
from phalanx.framework.core.errors import ConfigurationError, DesyncError, RankError, UnknownNameError
from phalanx.framework.distributed.rank_zero_first import first_in_turn
from phalanx.framework.distributed.world import World
from phalanx.framework.system.launcher_env import Placement


def gather_all() -> dict[str, Any]:
    fabric = Fabric(accelerator="cpu")
    rank = fabric.global_rank
    rows = torch.full((rank + 1, 2), rank)
    weight = torch.tensor(1.0, requires_grad=True)
    stacked = fabric.all_gather(weight * (rank + 1), sync_grads=True)
    (stacked * torch.tensor([1.0, 10.0])).sum().backward()
    assert weight.grad is not None
    return {
        "ragged": fabric.gather({"rows": rows, "flag": torch.tensor(rank == 1)}),
        "objects": fabric.gather_object([f"rank {rank}"] * (rank + 1)),
        "stacked": fabric.all_gather([torch.tensor([rank]), 2.5]),
        "mean": fabric.all_reduce({"a": torch.tensor([1.0 + rank]), "b": rank}),
        "sum": fabric.all_reduce(torch.tensor(rank + 1), op="sum"),
        "scaled": fabric.reduce(torch.tensor(1.0 + rank), "mean", scale=10.0),
        "kept": fabric.reduce(torch.tensor(rank), "none"),
        "broadcast": fabric.broadcast({"who": rank, "tensor": torch.tensor(rank)}, src=1),
        "padded": fabric.pad_across_processes([rows, torch.tensor(3)], pad_index=-1),
        "padded_first": fabric.pad_across_processes(rows[:, : rank + 1], dim=1, pad_index=-1, pad_first=True),
        "gradient": weight.grad,
    }


def test_data_travels_over_ranks() -> None:
    first, second = run_on_ranks(2, gather_all)
    for found in (first, second):
        assert found["ragged"]["rows"].tolist() == [[0, 0], [1, 1], [1, 1]]
        assert found["ragged"]["flag"].tolist() == [False, True]
        assert found["objects"] == ["rank 0", "rank 1", "rank 1"]
        assert found["stacked"][0].tolist() == [[0], [1]]
        assert found["stacked"][1].tolist() == [2.5, 2.5]
        assert (found["mean"]["a"].item(), found["mean"]["b"].item()) == (1.5, 0.5)
        assert (found["sum"].item(), found["scaled"].item()) == (3, 15.0)
        assert found["broadcast"] == {"who": 1, "tensor": torch.tensor(1)}
    assert first["padded"][0].tolist() == [[0, 0], [-1, -1]]
    assert second["padded"][0].tolist() == [[1, 1], [1, 1]]
    assert first["padded_first"].tolist() == [[-1, 0]]
    assert (first["kept"].item(), second["kept"].item()) == (0, 1)
    # Each rank's part is read by both ranks' losses: 2 x 1 x (0 + 1) and 2 x 10 x (1 + 1).
    assert (first["gradient"].item(), second["gradient"].item()) == (2.0, 40.0)


def test_one_process_gathers_itself() -> None:
    fabric = Fabric(accelerator="cpu")
    assert fabric.gather(torch.tensor(3)).tolist() == [3]
    assert fabric.gather((torch.ones(2), "a"))[1] == ["a"]
    assert fabric.all_gather(torch.ones(2)).shape == (1, 2)
    assert fabric.broadcast("x") == "x"
    assert fabric.gather_for_metrics(torch.empty(0, 3)).shape == (0, 3)
    with refuses(UnknownNameError, "'mena'", "'mean'"):
        fabric.reduce(torch.ones(1), "mena")


def gather_what_differs() -> None:
    fabric = Fabric(accelerator="cpu")
    with pytest.raises(ConfigurationError, match=r"\[1, 2\] float32"):
        fabric.gather(torch.ones(1, 1 + fabric.global_rank))
    with pytest.raises(DesyncError, match="rank 0: 1, rank 1: 2"):
        fabric.gather([torch.ones(1)] * (1 + fabric.global_rank))


def test_what_cannot_be_gathered_is_refused_on_all_ranks() -> None:
    run_on_ranks(2, gather_what_differs)


def split() -> list[Any]:
    fabric = Fabric(accelerator="cpu")
    found: list[Any] = []
    with fabric.split_between_processes(["a", "b", "c"]) as part:
        found.append(part)
    with fabric.split_between_processes(torch.arange(3), apply_padding=True) as part:
        found.append(part.tolist())
    with fabric.split_between_processes({"x": [1], "y": torch.tensor([2])}, apply_padding=True) as part:
        found.append((part["x"], part["y"].tolist()))
    return found


def test_inputs_are_split_between_ranks() -> None:
    first, second = run_on_ranks(2, split)
    assert first == [["a", "b"], [0, 1], ([1], [2])]
    assert second == [["c"], [2, 2], ([1], [2])]


def triggers() -> list[bool]:
    fabric = Fabric(accelerator="cpu")
    seen = [fabric.check_trigger()]
    if fabric.global_rank == 1:
        fabric.set_trigger()
        fabric.set_trigger("save")
    # A trigger waits for a check of its own name, and is gone after it.
    seen += [fabric.check_trigger("other"), fabric.check_trigger(), fabric.check_trigger()]
    seen += [fabric.check_trigger("save"), fabric.check_trigger("save")]
    return seen


def test_a_trigger_of_one_rank_is_seen_by_all() -> None:
    assert run_on_ranks(2, triggers) == [[False, False, True, False, True, False]] * 2
    fabric = Fabric(accelerator="cpu")
    fabric.set_trigger()
    assert [fabric.check_trigger(), fabric.check_trigger()] == [True, False]


def first_through(path: str, local: bool) -> list[str]:
    fabric = Fabric(accelerator="cpu")
    file = Path(path)
    with fabric.local_main_process_first() if local else fabric.main_process_first():
        before = file.read_text() if file.exists() else "nothing"
        if fabric.is_main_process:
            file.write_text("written")
    fabric.wait_for_everyone()
    file.unlink(missing_ok=True)
    fabric.barrier()
    return [before]


@pytest.mark.parametrize("local", [False, True])
def test_the_main_process_goes_first(tmp_path: Path, local: bool) -> None:
    assert run_on_ranks(2, first_through, str(tmp_path / "file"), local) == [["nothing"], ["written"]]


def first_fails(local: bool, seconds: float | None, naps: float) -> list[str]:
    fabric = Fabric(accelerator="cpu")
    try:
        with fabric.rank_zero_first(local=local, timeout=seconds):
            if fabric.is_main_process:
                time.sleep(naps)
                if seconds is None:
                    raise ValueError("no network")
    except (ValueError, RankError) as error:
        told = f"{type(error).__name__}: {error}"
    else:
        told = "through"
    # The next turn is a new one.
    with fabric.main_process_first():
        return [told]


@pytest.mark.parametrize("local", [False, True])
def test_who_waits_for_the_first_rank_learns_what_it_failed_of(local: bool) -> None:
    told = run_on_ranks(3, first_fails, local, None, 0.05)
    failed = "RankError: the block that this rank waited for failed on rank 0: ValueError: no network"
    assert told == [["ValueError: no network"], [failed], [failed]]


def test_who_waits_for_the_first_rank_does_so_within_a_limit_of_its_own() -> None:
    late = "RankError: the block that this rank waited for did not finish within 0.1 s: pass a longer timeout."
    assert run_on_ranks(2, first_fails, False, 0.1, 1.0) == [["through"], [late]]
    with refuses(ConfigurationError, "timeout=0"), Fabric().rank_zero_first(timeout=0):
        pass


def first_of_two_nodes(folder: str) -> list[str]:
    """Ranks 0 and 1 are the first of their nodes, as under ``mpirun --map-by node``; rank 2 is not."""
    rank = Fabric(accelerator="cpu").global_rank
    world = World(Placement(rank, 3, rank // 2, 2, rank % 2, 2), torch.device("cpu"))
    with first_in_turn(world, local=True, seconds=20.0):
        seen = sorted(path.name for path in Path(folder).iterdir())
        time.sleep(0.2 * (rank == 0))
        (Path(folder) / str(rank)).touch()
    after = sorted(path.name for path in Path(folder).iterdir())
    world.close()
    return seen if rank == 2 else after


def test_the_first_ranks_of_all_nodes_are_waited_for_however_ranks_lie_on_them(tmp_path: Path) -> None:
    first, second, last = run_on_ranks(3, first_of_two_nodes, str(tmp_path))
    assert {"0", "1"} <= {*first} & {*second}
    assert last == ["0", "1"]


SCRIPT = """
from phalanx import Fabric
fabric = Fabric(accelerator="cpu", devices=2)
fabric.launch()
fabric.print(f"{fabric.world_size} ranks")
try:
    with fabric.rank_zero_first():
        if fabric.is_global_zero:
            raise ValueError("no network")
except Exception:
    pass
if fabric.global_rank == 1:
    1 / 0
fabric.barrier()
"""


def test_a_failure_that_was_caught_is_not_blamed_for_a_later_one() -> None:
    done = run_script(SCRIPT)
    # The script was run again for each rank.
    assert done.stdout.count("2 ranks") == 1
    # Other lines may follow: a library may report at exit what the traceback has kept alive.
    errors = [line for line in done.stdout.splitlines() if "Error: " in line]
    assert errors == ["ZeroDivisionError: division by zero"]


def prepares(folder: str) -> str:
    class Prepared(Tiny):
        def prepare_data(self) -> None:
            raise OSError("the server is gone")

    with pytest.raises((OSError, RankError)) as raised:
        quiet_trainer(Path(folder), [], strategy="ddp", devices=2, max_steps=1).fit(Prepared(), loader())
    return f"{raised.type.__name__}: {raised.value}"


def test_a_failure_to_prepare_data_raises_on_all_ranks(tmp_path: Path) -> None:
    assert run_on_ranks(2, prepares, str(tmp_path)) == [
        "OSError: the server is gone",
        "RankError: the block that this rank waited for failed on rank 0: OSError: the server is gone",
    ]


def decorated() -> list[Any]:
    fabric = Fabric(accelerator="cpu")

    def work(value: int) -> int:
        return value

    runs = [
        fabric.on_main_process(work),
        fabric.on_local_main_process(work),
        fabric.on_last_process(work),
        fabric.on_process(process_index=1)(work),
    ]
    who = (fabric.is_main_process, fabric.is_local_main_process, fabric.is_last_process, fabric.is_global_zero)
    numbers = (fabric.process_index, fabric.local_process_index, fabric.num_processes, fabric.node_rank)
    return [[run(3) for run in runs], who, numbers]


def test_functions_and_properties_know_their_rank() -> None:
    first, second = run_on_ranks(2, decorated)
    assert first == [[3, 3, None, None], (True, True, False, True), (0, 0, 2, 0)]
    assert second == [[None, None, 3, 3], (False, False, True, False), (1, 1, 2, 0)]


# ---- starting the ranks ----------------------------------------------------------------------------------------------


def test_what_needs_ranks_says_that_launch_was_forgotten() -> None:
    fabric = Fabric(accelerator="cpu", devices=2)
    for verb in (
        fabric.barrier,
        lambda: fabric.setup(torch.nn.Linear(1, 1)),
        lambda: fabric.setup_dataloaders([1]),
        lambda: fabric.all_gather(torch.ones(1)),
        fabric.check_trigger,
    ):
        with refuses(ConfigurationError, "devices=2", "fabric.launch"):
            verb()


def in_rank(fabric: Fabric, factor: int, offset: int = 0) -> int:
    return factor * int(fabric.all_reduce(torch.tensor(fabric.global_rank + 1), op="sum")) + offset


def test_a_function_is_launched_in_forked_ranks_and_its_result_comes_back() -> None:
    fabric = Fabric(accelerator="cpu", devices=2)
    assert fabric.launch(in_rank, 10, offset=1) == 31
    with refuses(ConfigurationError, "launch(function)"):
        fabric.launch()


def test_without_ranks_to_start_the_function_just_runs() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    assert fabric.launch(in_rank, 10, offset=1) == 11
    assert fabric.launch() is None
