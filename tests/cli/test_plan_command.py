"""``phalanx plan``: the numbers of a script's run and of a class, for this machine and for others."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_terminal import Terminal, command, shown_lines, warm_command
from ranks import run_script

from phalanx.framework.core.size_text import size_text

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from phalanx import Trainer, TrainModule
from phalanx.framework.trainer import model_measurements

class Model(TrainModule):
    def __init__(self, width=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 1))
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

if __name__ == "__main__":
    # A run measures a model only if it is not small for the machine.
    model_measurements.fits_easily = lambda *given: False
    root, strategy, devices, width, drops = sys.argv[1:]
    print("printed by the script")
    data = DataLoader(TensorDataset(torch.randn(1000, 8)), 16, drop_last=drops == "drops")
    trainer = Trainer(
        strategy=strategy, devices=int(devices), accelerator="cpu", max_steps=1, accumulate_grad_batches=2,
        default_root_dir=root, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    try:
        trainer.fit(Model(int(width)), data)
    except Exception as error:
        print("handled by the script:", error)
    print("after the fit")
"""
PARAMETERS = 8 * 64 + 64 + 64 * 64 + 64 + 64 + 1


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (path := tmp_path / "train.py").write_text(SCRIPT)
    return path


def planned(script: Path, *arguments: Any, options: Sequence[Any] = ()) -> tuple[dict[str, Any], int]:
    """Return the plan as JSON, and the exit code."""
    done = warm_command("plan", "--json", *options, script.name, *arguments, cwd=script.parent)
    assert done.stdout.count("printed by the script") <= 1
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{\n") :])
    return found, done.returncode


def everywhere(needs: dict[str, dict[str, int]], kind: str) -> int:
    return sum(place[kind] for place in needs.values())


def test_the_numbers_are_those_that_a_run_on_the_same_ranks_prints(script: Path, tmp_path: Path) -> None:
    arguments = [str(tmp_path), "auto", "2", "64", "keeps"]
    printed = run_script(script, *arguments).stdout
    # All ranks have chosen the same strategy.
    assert "handled by the script" not in printed, printed
    found, code = planned(script, *arguments)
    assert (code, found["fits"], found["ranks"], found["parameters"]) == (0, True, 2, PARAMETERS)
    rows = {
        line.replace(">", " ").split()[0]: line
        for line in printed.splitlines()
        if re.match(r"[> ] (ddp|fsdp|zero3)", line)
    }
    assert f"> {found['strategy']} " in printed
    assert {"ddp", "fsdp"} <= rows.keys()
    planned_rows = {each["name"]: each for each in found["strategies"]}
    for name, line in rows.items():
        needs = planned_rows[name]["needs"]
        kinds = [size_text(everywhere(needs, kind)) for kind in needs["device"]]
        places = [size_text(sum(place.values())) for place in needs.values()]
        cells = " ".join(line.replace(">", " ").split())
        assert cells.startswith(" ".join([name, *kinds, *places])), printed


def test_a_script_is_planned_for_other_machines_and_trains_nothing(script: Path, tmp_path: Path) -> None:
    here, _ = planned(script, tmp_path, "fsdp", "2", "64", "keeps")
    there, code = planned(
        script, tmp_path, "fsdp", "2", "64", "keeps", options=["--ranks", 16, "--device-memory", "80GB"]
    )
    assert (code, there["strategy"], there["ranks_per_node"]) == (0, "fsdp", 8)
    assert (here["ranks"], there["ranks"]) == (2, 16)
    assert here["needs"]["device"]["parameters"] == -(-PARAMETERS * 4 // 2)
    assert there["needs"]["device"]["parameters"] == -(-PARAMETERS * 4 // 16)
    assert here["available"]["device_is_host"] != there["available"]["device_is_host"]
    assert 78e9 < there["available"]["device"] < 80e9
    # Twice in each of two micro-batches all parameters of the other ranks arrive.
    gathered = next(each for each in there["communication"] if each["operation"] == "all-gather")
    assert (gathered["times"], gathered["sent"]) == (4, 4 * 4 * PARAMETERS * 15 // 16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_the_interval_that_the_run_will_choose_for_its_saves_is_foretold(script: Path, tmp_path: Path) -> None:
    chosen = "callbacks=__import__('phalanx').callbacks.ModelCheckpoint(every='auto')"
    script.write_text(SCRIPT.replace("enable_checkpointing=False", chosen))
    machines = ["--ranks", 1024, "--device-memory", "80GB"]
    plan, _ = planned(script, tmp_path, "fsdp", 2, 64, "keeps", options=machines)
    # The square root of twice the seconds of a save times 50,000 h / 1024.
    assert "one failure in 2 d is assumed for 1,024 ranks" in plan["saves"][0]
    assert "every 9 min 53 s if a save takes 1 s, every 54 min 8 s if it takes 30 s" in plan["saves"][0]


def test_degrees_of_parallelism_are_planned(script: Path, tmp_path: Path) -> None:
    plan, _ = planned(script, tmp_path, "fsdp", 8, 64, "keeps", options=["--parallel", "tp=2,dp_replicate=2"])
    assert (plan["ranks"], plan["batch"]["ranks"], plan["parallel"]) == (8, 4, {"dp_replicate": 2, "tp": 2})
    # Two ranks share the state of a replica; layers count in full.
    assert everywhere(plan["needs"], "parameters") == 4 * PARAMETERS // 2
    assert any("Layers that tp splits count in full" in note for note in plan["notes"])
    done = warm_command("plan", "--parallel", "tp=3", script.name, tmp_path, "fsdp", "8", "64", "keeps", cwd=tmp_path)
    assert done.returncode == 78
    assert "Use tp out of 1, 2, 4, 8, or 6 or 9 ranks." in " ".join(done.stdout.split())


def test_a_script_for_gpus_is_planned_without_them(script: Path, tmp_path: Path) -> None:
    # A callback that needs a logger, and a precision that no CPU trains in.
    given = "accelerator='cuda', precision='16-mixed', callbacks='learning_rate_monitor', "
    text = SCRIPT.replace('accelerator="cpu", ', given).replace("logger=False, ", "")
    script.write_text(text.replace("enable_checkpointing=False, ", ""))
    found, code = planned(script, tmp_path, "zero2", "8", "64", "keeps", options=["--device-memory", "80GB"])
    assert (code, found["strategy"], found["ranks"], found["precision"]) == (0, "zero2", 8, "16-mixed")
    assert found["needs"]["device"]["parameters"] == 2 * PARAMETERS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.parametrize(
    ("ranks", "drops", "steps", "last"),
    [(1, "keeps", 32, 8), (8, "keeps", 4, 232), (8, "drops", 4, 128)],
)
def test_the_arithmetic_of_batches(ranks: int, drops: str, steps: int, last: int, script: Path, tmp_path: Path) -> None:
    found, _ = planned(script, tmp_path, "auto", "1", "64", drops, options=["--ranks", ranks])
    assert found["batch"] == {
        "micro_batch": 16, "window": 2, "ranks": ranks, "global_batch": 32 * ranks, "samples": 1000,
        "steps_per_epoch": steps, "samples_of_last_step": last,
    }  # fmt: skip


def test_what_does_not_fit_exits_with_69_and_is_answered_with_what_does(script: Path, tmp_path: Path) -> None:
    options = ["--ranks", 4, "--device-memory", "1800MB", "--strategy"]
    arguments = [tmp_path, "fsdp", "2", "4096", "keeps"]
    found, code = planned(script, *arguments, options=[*options, "ddp"])
    assert (code, found["fits"], found["shortage"], found["strategy"]) == (69, False, "device", "ddp")
    instead = found["instead"]["strategies"]
    assert ("ddp" in instead, "zero3-offload" in instead) == (False, True)
    again, code = planned(script, *arguments, options=[*options, instead[0]])
    assert (code, again["fits"], again["instead"]) == (0, True, None)
    done = warm_command("plan", *options, "ddp", script.name, *arguments, cwd=tmp_path)
    assert done.returncode == 69
    assert done.stdout.splitlines()[-2:] == [
        "does not fit: too large for the device",
        f"what fits instead: strategy {', '.join(instead)}",
    ]


def test_what_libraries_take_of_a_device_is_shown_and_that_nothing_fits_once(script: Path, tmp_path: Path) -> None:
    arguments = [script.name, tmp_path, "fsdp", "2", "64", "keeps"]
    done = warm_command("plan", "--device-memory", "1MB", *arguments, cwd=tmp_path)
    assert done.returncode == 69
    rows = {line[:18].strip(): line[18:].split() for line in done.stdout.splitlines()}
    assert (rows["for CUDA libraries"][:2], rows["available"][0]) == (["1.5", "GB"], "0")
    assert done.stdout.lower().count("nothing") == 1
    here = warm_command("plan", *arguments, cwd=tmp_path)
    assert "for CUDA libraries" not in here.stdout


def test_a_class_is_planned_without_data(script: Path) -> None:
    done = warm_command("plan", "--json", "train:Model", cwd=script.parent)
    found = json.loads(done.stdout)
    assert (found["model"], found["parameters"], found["batch"]["micro_batch"]) == ("Model", PARAMETERS, None)
    assert (found["needs"]["device"]["activations"], found["strategy"]) == (0, "single")


def test_the_plan_fits_a_terminal_of_80_columns(script: Path, tmp_path: Path) -> None:
    shown = Terminal(["plan", script.name, str(tmp_path), "ddp", "2", "64", "keeps"], tmp_path).end()
    lines = shown_lines(shown)
    assert max(map(len, lines)) <= 80
    assert "\x1b[" in shown
    assert "strategy   ddp, 2 ranks on 1 node, precision 32-true" in lines
    assert "batch      micro-batch x window x ranks: 16 x 2 x 2 = 64 samples" in lines
    assert "epoch      1,000 samples: 16 steps, the last of which has 40" in lines
    assert any(line.startswith("step       all-reduce of the gradients, once: a rank sends ") for line in lines)
    assert lines[-1] == "fits"


IN_A_THREAD = """
import threading
from phalanx import Trainer
from train import Model, TensorDataset, DataLoader, torch

def fit():
    data = DataLoader(TensorDataset(torch.randn(100, 8)), 16)
    Trainer(devices=4, strategy="fsdp", accelerator="cpu", logger=False).fit(Model(), data)
    results.append("trained")

results = []
thread = threading.Thread(target=fit)
thread.start()
thread.join()
print(results[0])
"""
TWO_TRAINERS = """
from phalanx import Trainer
from train import Model, TensorDataset, DataLoader, torch

first = Trainer(devices=4, strategy="fsdp", accelerator="cpu", accumulate_grad_batches=2)
second = Trainer(devices=8, strategy="ddp", accelerator="cpu", precision="bf16-mixed")
first.fit(Model(), DataLoader(TensorDataset(torch.randn(100, 8)), 16))
"""


@pytest.mark.parametrize(("text", "window"), [(IN_A_THREAD, 1), (TWO_TRAINERS, 2)], ids=["thread", "two trainers"])
def test_the_plan_is_that_of_the_fit_that_the_script_calls(text: str, window: int, script: Path) -> None:
    (path := script.with_name("fits.py")).write_text(text)
    done = warm_command("plan", "--json", path.name, cwd=path.parent)
    assert "Traceback" not in done.stdout
    found = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert (found["strategy"], found["ranks"], found["precision"]) == ("fsdp", 4, "32-true")
    assert (found["batch"]["window"], found["parameters"]) == (window, PARAMETERS)
    assert not (path.parent / "phalanx_logs").exists()


def test_the_nodes_are_those_of_the_script(script: Path) -> None:
    (path := script.with_name("nodes.py")).write_text(TWO_TRAINERS.replace("devices=4", "devices=6, num_nodes=2"))
    for options, ranks, local in (([], 12, 6), (["--ranks", 16], 16, 8), (["--ranks-per-node", 4], 12, 4)):
        done = warm_command("plan", "--json", *options, path.name, cwd=path.parent)
        found = json.loads(done.stdout)
        assert (found["ranks"], found["ranks_per_node"]) == (ranks, local)


LOOP = """
import torch
from phalanx import Fabric
model = torch.nn.Linear(2, 1)
Fabric(accelerator="cpu", devices=1).setup(model, torch.optim.SGD(model.parameters()))
print("training")
"""
HANDLED = """
from phalanx import Fabric
try:
    Fabric(accelerator="cpu", devices=2).launch()
except BaseException:
    print("handled")
else:
    print("training")
"""
TESTED = """
from phalanx import Trainer
from train import Model

class Tested(Model):
    def test_step(self, batch, index):
        pass

Trainer().test(Tested(), [0])
"""
ENDINGS = {
    "loop.py": (LOOP, 78, "loop.py has a loop of its own, on Fabric"),
    "handled.py": (HANDLED, 78, "handled.py has a loop of its own, on Fabric"),
    "unfinished.py": ("print('no fit here')", 78, "unfinished.py ended without calling fit"),
    "broken.py": ("value = {}\nvalue['missing']", 1, "KeyError: 'missing'"),
    "syntax.py": ("value = {", 1, "SyntaxError: '{' was never closed"),
    "config.yaml": (
        "a: [b",
        78,
        "'config.yaml' is not a Python script: a plan is made of a script or of",
    ),
    "tests.py": (TESTED, 78, "tests.py calls test before fit"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_script_without_a_fit_is_answered(name: str, script: Path) -> None:
    text, code, expected = ENDINGS[name]
    (path := script.with_name(name)).write_text(text)
    done = warm_command("plan", path.name, cwd=path.parent)
    assert done.returncode == code, done.stdout
    assert expected in done.stdout
    assert "training" not in done.stdout
    # The user's own lines alone.
    assert "runpy" not in done.stdout
    assert "planned_program" not in done.stdout


def test_wrong_arguments_are_answered_in_one_line(script: Path, tmp_path: Path) -> None:
    fit = [script.name, tmp_path, "ddp", "2", "64", "keeps"]
    for run, arguments, expected in (
        (command, ["trian.py"], "There is no script 'trian.py'. Did you mean 'train.py'?"),
        (command, ["--ranks", "many", *fit], "argument --ranks: invalid int value: 'many'."),
        (command, ["--device-memory", "80", *fit], "--device-memory 80 has no unit: give a size such as 80GB."),
        (command, ["--strategy", "dpd", *fit], "Did you mean 'ddp'?"),
        # These import the script, or run it.
        (warm_command, ["train:Modle"], "'train:Modle': train has no Modle. Did you mean 'Model'?"),
        (warm_command, ["--ranks", "12", *fit], "ranks=12 do not fill nodes of 8 ranks"),
        (warm_command, ["--device-memory", "lots", *fit], "device_memory='lots' is not a size"),
    ):
        done = run("plan", *arguments, cwd=tmp_path)
        lines = [line for line in done.stdout.splitlines() if line != "printed by the script"]
        assert (done.returncode, len(lines)) == (78, 1), done.stdout
        assert expected in lines[0]


MESH = """
import sys
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader
from phalanx import Trainer, TrainModule

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.project = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 32)
    def forward(self, x):
        heads = (each(x).view(*x.shape[:2], -1, 8).transpose(1, 2) for each in self.qkv)
        mixed = scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.project(mixed.transpose(1, 2).flatten(2))

class Model(TrainModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
    def training_step(self, batch, index):
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()
    def configure_tensor_parallel(self, mesh):
        return {"blocks.*.qkv.*": ColwiseParallel(), "blocks.*.project": RowwiseParallel()}
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

if __name__ == "__main__":
    trainer = Trainer(
        strategy=sys.argv[1], devices=2, accelerator="cpu", max_steps=1, accumulate_grad_batches=int(sys.argv[2]),
        verbose=False, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(Model(), DataLoader(torch.randn(64, 16, 32), 4))
"""
BLOCK = 4 * (32 * 32 + 32) * 4


@pytest.fixture
def mesh_script(tmp_path: Path) -> Path:
    (path := tmp_path / "mesh.py").write_text(MESH)
    return path


@pytest.mark.parametrize(
    ("degrees", "window", "strategy", "parameters"),
    [
        ("tp=2", 1, "fsdp", 4 * BLOCK / 8),
        ("pp=4", 4, "pipeline", BLOCK),
    ],
)
def test_a_plan_with_degrees_is_rehearsed(
    mesh_script: Path, degrees: str, window: int, strategy: str, parameters: float
) -> None:
    options = ["--ranks", 8, "--parallel", degrees, "--strategy", strategy]
    found, code = planned(mesh_script, "auto", window, options=options)
    assert (code, found["strategy"], found["refusal"]) == (0, strategy, None)
    assert found["rehearsed_rank"] in range(8)
    # What tp does not split, the bias of a projection, is small.
    assert everywhere(found["needs"], "parameters") == pytest.approx(parameters, rel=0.05)
    axis = degrees.partition("=")[0]
    assert any(axis in each["axis"] and each["sent"] > 0 for each in found["communication"])


@pytest.mark.parametrize(
    ("degrees", "window", "strategy", "sentence"),
    [
        ("tp=8", 1, "fsdp", "With parallel={'tp': 4} it does not."),
        ("pp=8", 8, "pipeline", "use 2, 3, 4 stages"),
    ],
)
def test_degrees_that_do_not_divide_a_module_are_refused_with_others(
    mesh_script: Path, degrees: str, window: int, strategy: str, sentence: str
) -> None:
    options = ["--ranks", 64, "--parallel", degrees, "--strategy", strategy]
    found, code = planned(mesh_script, "auto", window, options=options)
    assert code != 0
    assert sentence in found["refusal"]


def test_a_window_that_leaves_ranks_of_a_pipeline_idle_is_noted(mesh_script: Path) -> None:
    found, code = planned(mesh_script, "auto", 2, options=["--ranks", 64, "--parallel", "pp=4"])
    assert (code, found["strategy"]) == (0, "pipeline")
    assert "each of which waits" in " ".join(found["notes"])


def test_degrees_that_fit_are_proposed(mesh_script: Path) -> None:
    options = ["--ranks", 8, "--rehearse", "--host-memory", "4MB", "--ranks-per-node", 8]
    found, code = planned(mesh_script, "ddp", 1, options=options)
    assert (code != 0, found["shortage"]) == (True, "device")
    assert "parallel=" in " ".join(found["notes"])


@pytest.mark.parametrize(("strategy", "parts"), [("ddp", 1), ("fsdp", 2)])
def test_the_memory_of_verified_steps_is_noted(script: Path, strategy: str, parts: int) -> None:
    script.write_text(SCRIPT.replace("max_steps=1", "max_steps=1, verify_every=10"))
    notes = " ".join(planned(script, script.parent, strategy, 2, 64, "keeps")[0]["notes"])
    # Weights, gradients and both moments of AdamW in fp32.
    assert f"optimizer state: {size_text(4 * 4 * PARAMETERS // parts)} more under {strategy}." in notes
    assert "a verified step" not in " ".join(planned(script, script.parent, "zero2", 2, 64, "keeps")[0]["notes"])


@pytest.mark.parametrize(
    ("given", "takes"), [("snapshots=10", True), ("max_restarts=2", True), ("max_restarts=0", False)]
)
def test_the_memory_of_snapshots_is_noted(script: Path, given: str, takes: bool) -> None:
    script.write_text(SCRIPT.replace("max_steps=1", f"max_steps=1, {given}"))
    notes = " ".join(planned(script, script.parent, "ddp", 2, 64, "keeps")[0]["notes"])
    # Three copies of the weights and of both moments of AdamW in fp32.
    assert (f"snapshots take {size_text(3 * 4 * 3 * PARAMETERS)} of host memory" in notes) is takes
