"""Memory formulas, measurements of a model, ``Trainer.plan``, and the choice of ``strategy="auto"``."""

from __future__ import annotations

import gc
import re
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import Regressor, loader, silent_trainer, weights_of
from ranks import run_on_ranks, run_script
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader, TensorDataset

from phalanx import DataModule, TrainModule
from phalanx.framework.core import registry
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.core.precision import resolve_precision
from phalanx.framework.core.size_text import size_text
from phalanx.framework.distributed.shared_memory_reduce import TensorSums
from phalanx.framework.memory.available_memory import Memory, available_memory, host_memory
from phalanx.framework.memory.formulas import ModelSize, Ranks, footprint
from phalanx.framework.memory.measure import (
    Activations,
    measure_with_fake_tensors,
    optimizer_state,
    size_of,
    without_data,
)
from phalanx.framework.memory.memory_plan import MemoryPlan, counted_layouts, make_plan
from phalanx.framework.trainer import auto_strategy as planning
from phalanx.strategies import DDPStrategy, MemoryLayout

FP32, BF16 = resolve_precision("32-true"), resolve_precision("bf16-mixed")
GB = 10**9
LAYOUTS = counted_layouts()
# Under ZeRO, reading parameter.grad gathers the gradient.
OWN_GRAD: Any = Tensor.grad


class Net(TrainModule):
    """Blocks, an embedding that is tied to the head, batch norm, and a frozen layer."""

    def __init__(self, width: int = 16, optimizer: str = "AdamW", **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.drop = nn.Dropout(0.5)
        self.choice = optimizer, options
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        hidden: Tensor = self.embedding(batch[0])
        for block in self.blocks:
            hidden = block(hidden)
        loss: Tensor = self.head(self.drop(self.frozen(self.norm(hidden)))).logsumexp(1).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        name, options = self.choice
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(
            [p for p in self.parameters() if p.requires_grad], **{"lr": 0.1, **options}
        )
        return optimizer


def words(count: int = 12) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count) % 10), batch_size=4, shuffle=True)


# ---- the formulas -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "window", "fp32", "bf16"),
    [
        ("single", 1, 16, 16),
        ("ddp", 1, 16, 16),
        ("fsdp", 1, 8, 8),
        ("fsdp", 4, 10, 10),
        ("hsdp", 1, 16, 16),
        ("zero1", 1, 4 + 12 / 2 + 4 / 2, 2 + (2 + 4) + 12 / 2),
        ("zero1", 4, 4 + 4 + 12 / 2, 2 + (2 + 4) + 12 / 2),
        ("zero2", 4, 4 + (4 + 12) / 2, 2 + (4 + 12) / 2),
        ("zero3", 4, (4 + 4 + 12) / 2, (2 + 4 + 12) / 2),
        ("zero1-offload", 4, 4 + 4 + (12 + 4 + 4) / 2, 2 + 4 + (12 + 4 + 2) / 2),
        ("zero2-offload", 4, 4 + (12 + 8 + 4) / 2, 2 + (12 + 8 + 2) / 2),
        ("zero3-offload", 4, (4 + 12 + 8) / 2, (2 + 12 + 8) / 2),
        ("zero3-nvme", 4, 4 / 2 + (4 + 12 + 4) / 2, 4 / 2 + (2 + 12 + 4) / 2),
    ],
)
def test_bytes_for_each_element_on_two_ranks_with_adam(name: str, window: int, fp32: float, bf16: float) -> None:
    size, ranks = ModelSize(1_000_000), Ranks(1 if name == "single" else 2)
    for precision, each in ((FP32, fp32), (BF16, bf16)):
        needs = footprint(LAYOUTS[name], size, ranks, precision, accumulates=window > 1)
        assert needs.everywhere.held == each * 1_000_000


def test_formulas_reproduce_the_example_of_the_zero_paper() -> None:
    # Figure 1: 7.5 billion parameters on 64 devices, Adam, 16-bit gradients: 16.6 GB and 1.9 GB. Ours gather in fp32.
    size, ranks = ModelSize(7_500_000_000), Ranks(64)
    second, third = (footprint(LAYOUTS[name], size, ranks, BF16).device.held for name in ("zero2", "zero3"))
    wider = 2 * 7_500_000_000 / 64
    assert round((second - wider) / GB, 1) == 16.6
    assert round((third - wider) / GB, 1) == 1.9


def test_other_optimizers_frozen_parameters_and_one_rank() -> None:
    size = ModelSize(1_000_000, frozen=3_000_000, state_slots=1.0, buffer_bytes=10)
    assert footprint(LAYOUTS["single"], size, Ranks(1), FP32).device.held == 4 * 4_000_000 + 10 + (4 + 4) * 1_000_000
    second = footprint(LAYOUTS["zero2"], size, Ranks(4), BF16).device
    assert second.parameters == 2 * 4_000_000 + 10
    assert second.held - second.parameters == (4 + 4 + 4) * 1_000_000 / 4


def test_updates_take_the_memory_of_activations_first() -> None:
    size = ModelSize(1_000_000, update_bytes=4_000_000)

    def buckets(name: str, activations: int, update: ModelSize = size) -> int:
        return footprint(LAYOUTS[name], update, Ranks(4), FP32, activations).device.buckets

    none = ModelSize(1_000_000)
    for name, needed in (("ddp", 4_000_000), ("fsdp", 1_000_000), ("hsdp", 2_000_000), ("zero2", 0)):
        assert buckets(name, 0) - buckets(name, 0, none) == needed
        assert buckets(name, 300_000) - buckets(name, 300_000, none) == max(0, needed - 300_000)
        assert buckets(name, 5_000_000) == buckets(name, 5_000_000, none)


@pytest.mark.parametrize(("device_type", "counted"), [("cuda", 4 * 129), ("cpu", 0)])
def test_the_default_of_torchs_optimizers_is_counted_where_it_is_foreach(device_type: str, counted: int) -> None:
    sizes = optimizer_state(without_data(Regressor()), FP32, device_type)
    assert (sizes.update_bytes, sizes.count) == (counted, 1)


def held_by_a_rank(name: str, precision: str, window: int) -> tuple[int, int, int]:
    """Train on this rank; return its peak of tensor bytes, and the formulas' result without and with buckets."""

    class Watched(Net):
        most = 0

        def watch(self) -> None:
            if self.global_step >= 1:
                # The thread of gloo that has run a collective may hold its tensors a little longer.
                passing = live_bytes()
                time.sleep(0.1)
                self.most = max(self.most, min(passing, live_bytes()))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            # Not on_after_backward, for which gradients of each micro-batch are reduced.
            self.watch()
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.watch()

    before = live_bytes()
    trainer = silent_trainer(strategy=name, precision=precision, max_steps=2, devices=2, accumulate_grad_batches=window)
    module = Watched(512)
    module.norm = nn.Identity()  # type: ignore[assignment]
    size = size_of(module)
    trainer.fit(module, words(64))
    needs = footprint(LAYOUTS[name], size, Ranks(2), resolve_precision(precision), accumulates=window > 1).everywhere
    return module.most - before, needs.held, needs.held + needs.buckets


def live_bytes() -> int:
    """Count the bytes of this process's tensors, without those of the memory that ranks share, which has a limit."""
    gc.collect()
    sizes = {}
    shared = [one for one in gc.get_objects() if isinstance(one, TensorSums)]
    rows = {row.untyped_storage().data_ptr() for sums in shared for each in sums._rows.values() for row in each}
    for found in (one for one in gc.get_objects() if issubclass(type(one), Tensor)):
        # Those of an earlier test's compiled code, which torch keeps, have no data.
        if isinstance(found, FakeTensor):
            continue
        for tensor in (found, OWN_GRAD.__get__(found) if found.is_leaf else None):
            local: Any = getattr(tensor, "_local_tensor", tensor)
            if local is not None and local.device.type == "cpu":
                sizes[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(size for place, size in sizes.items() if place not in rows)


@pytest.mark.parametrize(
    ("name", "precision", "window"),
    [("ddp", "32-true", 1), ("fsdp", "32-true", 2), ("zero2", "bf16-mixed", 1)],
)
def test_formulas_match_the_bytes_that_a_rank_holds(name: str, precision: str, window: int) -> None:
    for most, held, with_buckets in run_on_ranks(2, held_by_a_rank, name, precision, window):
        assert 0.98 * held <= most <= 1.05 * with_buckets


# ---- measurements -------------------------------------------------------------------------------------------------


def test_a_models_size_counts_tied_parameters_once_and_frozen_ones_apart() -> None:
    size = size_of(Net(16))
    block = 16 * 16 + 16
    assert (size.trainable, size.frozen) == (10 * 16 + 3 * block + 2 * 16, block)
    assert (size.largest_block, size.outside_blocks) == (block, size.elements - 3 * block)
    assert size.buffer_bytes == 2 * 16 * 4 + 8


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {"fused": True}),
        ("RMSprop", {"centered": True, "momentum": 0.5}),
        ("Adagrad", {}),
        ("Adafactor", {}),
    ],
)
def test_optimizer_state_is_what_a_real_step_leaves(name: str, options: dict[str, Any]) -> None:
    module = Net(16, name, **options)
    sizes = optimizer_state(without_data(module), FP32, "cpu")
    optimizer = module.configure_optimizers()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [slot for state in optimizer.state.values() for slot in state.values() if isinstance(slot, Tensor)]
    elements = sum(slot.numel() for slot in kept if slot.dim())
    assert round(sizes.slots * size_of(module).trainable) == elements
    assert (sizes.state_bytes, sizes.count) == (4 * elements, 1)


def test_activations_are_the_tensors_saved_for_backward() -> None:
    # Of a micro-batch of 4: inputs, the layer between, outputs and targets; the weights are parameters.
    plan = silent_trainer(devices=1).plan(Regressor(), loader())
    assert plan.activations == Activations(4 * 4 * (6 + 16 + 1 + 1))


def test_activations_on_fake_tensors_are_the_same() -> None:
    module, batch = Net(16), [torch.arange(4)]
    for precision in ("32-true", "bf16-mixed"):
        real = silent_trainer(devices=1, precision=precision).plan(module, words()).activations
        assert real is not None
        on_shapes = measure_with_fake_tensors(module, batch, resolve_precision(precision))
        assert on_shapes.casts == real.casts
        # Kernels differ in the dtype in which batch statistics are kept.
        assert on_shapes.kept == pytest.approx(real.kept, rel=0 if precision == "32-true" else 0.1)
    assert real is not None
    # Those of biases and norms are kept or not, as kernels go.
    assert real.casts == pytest.approx(2 * (10 * 16 + 3 * 16 * 16), rel=0.1)


@pytest.mark.parametrize("side", [1, 10**7])
def test_batches_that_a_module_cuts_are_measured_with_data_and_without(side: int) -> None:
    class Cuts(Regressor):
        def configure_model(self) -> None:
            # Of side 10**7 it takes 400 TB, so the model is measured on tensors without data.
            self.large = nn.Parameter(torch.empty(side, side))

        def cut_sequences(self, batch: Any, part: Any) -> Any:
            return {"inputs": batch[0], "targets": batch[1]}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.mse_loss(self.net(batch["inputs"]), batch["targets"])

    plan = silent_trainer(devices=1).plan(Cuts(), loader())
    assert plan.activations == Activations(4 * 4 * (6 + 16 + 1 + 1))


def test_planning_does_not_change_the_module_or_the_generators() -> None:
    module, data = Net(16).eval(), words()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    generator = torch.get_rng_state()
    silent_trainer(devices=2, strategy="ddp").plan(module, data)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert not module.training
    assert module.steps == 0
    assert all(parameter.grad is None for parameter in module.parameters())


def test_failed_measurements_leave_a_note() -> None:
    class Asks(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * self.trainer.world_size

        def configure_optimizers(self) -> Any:
            raise ValueError("no such thing")

    plan = silent_trainer(devices=1).plan(Asks(), loader())
    assert plan.activations is None
    assert plan.size.state_slots == 2.0
    assert "belongs to no run" in str(plan)
    assert "no such thing" in str(plan)


def test_layers_of_configure_model_and_data_of_a_datamodule_count() -> None:
    class Late(Regressor):
        def __init__(self) -> None:
            super().__init__()
            del self.net

        def configure_model(self) -> None:
            self.net = nn.Sequential(nn.Linear(6, 1))

    class Numbers(DataModule):
        def setup(self, stage: str) -> None:
            self.data = loader()

        def train_dataloader(self) -> Any:
            return self.data

    module, data = Late(), Numbers()
    plan = silent_trainer(devices=1).plan(module, data)
    assert plan.size.trainable == 7
    assert plan.activations == Activations(4 * 4 * (6 + 1 + 1))
    assert not hasattr(module, "net")
    assert not hasattr(data, "data")


def test_an_iterator_as_data_is_not_consumed() -> None:
    batches = iter([next(iter(loader()))])
    assert silent_trainer(devices=1).plan(Regressor(), batches).activations is None
    assert next(batches)


# ---- available memory ---------------------------------------------------------------------------------------------


def machine(root: Path, available: int, files: dict[str, str], cgroup: str) -> tuple[Path, Path]:
    proc, cgroups = root / "proc", root / "cgroups"
    written = {"meminfo": f"MemTotal: 9 kB\nMemAvailable: {available // 1024} kB\n", "self/cgroup": cgroup}
    for folder, texts in ((proc, written), (cgroups, files)):
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return proc, cgroups


def test_host_memory_is_the_minimum_of_all_limits_divided_among_ranks(tmp_path: Path) -> None:
    second = {
        "a/memory.max": "1000000\n", "a/memory.current": "300000\n", "a/memory.stat": "anon 9\ninactive_file 100000\n",
        "a/b/memory.max": "max\n", "a/b/memory.current": "1\n",
    }  # fmt: skip
    assert host_memory(2, *machine(tmp_path / "v2", 10 * GB, second, "0::/a/b\n")) == 800_000 // 2
    first = {
        "memory/a/memory.limit_in_bytes": "500000\n", "memory/a/memory.usage_in_bytes": "100000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "5\n",
    }  # fmt: skip
    assert host_memory(1, *machine(tmp_path / "v1", 10 * GB, first, "4:memory:/a\n0::/\n")) == 400_000
    # In a container the path is the host's, and the visible root is this group.
    inside = {"memory.max": "70000", "memory.current": "20000"}
    assert host_memory(1, *machine(tmp_path / "inside", 10 * GB, inside, "0::/elsewhere\n")) == 50_000
    assert host_memory(4, *machine(tmp_path / "free", 4096 * 1024, {}, "")) == 1024 * 1024


def test_host_memory_respects_the_limits_of_the_process() -> None:
    script = """
import resource
from phalanx.framework.memory.available_memory import host_memory
free = host_memory(1)
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + 300_000_000, resource.RLIM_INFINITY))
print("LEFT", host_memory(1) <= 300_000_000 < free)
"""
    assert "LEFT True" in run_script(script).stdout


# ---- the plan -----------------------------------------------------------------------------------------------------


def plan_of(device: int, host: int = GB, disk: int = GB, ranks: int = 2, **refusals: str) -> MemoryPlan:
    """Plan for 10 million parameters on an accelerator."""
    size = ModelSize(10_000_000, largest_block=1_000_000, largest_parameter=100_000)
    memory = Memory(device, host, disk, device_is_host=False)
    named = {name.replace("_", "-"): refusal for name, refusal in refusals.items()}
    return make_plan(LAYOUTS, size, Ranks(ranks), FP32, "cuda", memory, Activations(1_000_000), named)


def test_the_first_strategy_that_fits_is_chosen() -> None:
    assert plan_of(300_000_000).chosen == "ddp"
    assert plan_of(300_000_000, ranks=1).chosen == "single"
    assert plan_of(150_000_000).chosen == "fsdp"
    assert plan_of(50_000_000).chosen == "zero3-offload"
    assert plan_of(50_000_000, host=100_000_000).chosen == "zero3-nvme"


def test_refused_strategies_are_skipped_and_the_smallest_is_chosen_if_none_fits() -> None:
    assert plan_of(150_000_000, fsdp="Not here. Do that.").chosen == "zero3-offload"
    plan = plan_of(1_000, zero3_nvme="no folder")
    assert (plan.chosen, plan.fits) == ("zero3-offload", False)
    assert plan["ddp"].shortage == "device"
    assert plan["zero3-nvme"].refusal == "no folder"
    assert "Nothing fits" in str(plan)


def test_a_plan_has_a_row_for_every_strategy_and_prints_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHALANX_NVME_PATH", raising=False)
    plan = silent_trainer(devices=2, gradient_clip_val=1.0, gradient_clip_algorithm="value").plan(Net(16), words())
    assert [row.name for row in plan] == list(LAYOUTS)
    assert plan["single"].refusal is not None
    assert "nvme_path" in (plan["zero3-nvme"].refusal or "")
    assert plan["fsdp"].refusal is None
    assert plan["zero2"].refusal == "It clips only by norm."
    assert plan.chosen == "ddp"
    text = str(plan)
    assert "> ddp" in text
    assert all(f" {name} " in text for name in LAYOUTS)
    with refuses(ConfigurationError, "'zero4'", "'zero3'"):
        plan["zero4"]


class SplitState(DDPStrategy):
    name = "split-state"
    memory_layout = MemoryLayout(splits_state=True)


def test_a_strategy_of_another_package_has_a_row_by_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("split-state", f"{__name__}:SplitState", "phalanx.strategies")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    plan = silent_trainer(devices=2).plan(Net(16), words())
    assert [row.name for row in plan] == [*LAYOUTS, "split-state"]
    parts = plan["single"].needs.device, plan["split-state"].needs.device
    assert parts[1].optimizer_state == -(-parts[0].optimizer_state // 2) > 0
    assert parts[1].parameters == parts[0].parameters


def test_given_activation_bytes_need_no_data() -> None:
    plan = silent_trainer(devices=1).plan(Regressor(), activation_bytes=GB)
    assert plan["single"].needs.device.activations == GB
    with refuses(ConfigurationError, "activation_bytes=-1"):
        silent_trainer(devices=1).plan(Regressor(), loader(), activation_bytes=-1)
    with refuses(ConfigurationError, "train_dataloaders"):
        silent_trainer(devices=1).plan(Regressor())


def test_several_optimizers_exclude_deepspeed() -> None:
    class Two(Net):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(self.blocks.parameters()), torch.optim.SGD(self.norm.parameters(), 0.1)]

    plan = silent_trainer(devices=2).plan(Two(16), words(), activation_bytes=0)
    assert "2 optimizers" in (plan["zero2"].refusal or "")
    assert plan["fsdp"].refusal is None


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (999, "999 B"), (1000, "1.0 KB"), (83_200_000_000, "83.2 GB")])
def test_bytes_are_shown_with_a_unit(number: int, text: str) -> None:
    assert size_text(number) == text


# ---- auto ---------------------------------------------------------------------------------------------------------


def test_auto_measures_nothing_for_a_small_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning, "measure", lambda *arguments: pytest.fail("measured"))
    trainer = silent_trainer(devices=1, max_steps=1)
    trainer.fit(Regressor(), loader())
    assert trainer.strategy.name == "single"
    assert "Memory" not in capsys.readouterr().out


def fit_with_memory(strategy: str, memories: list[int]) -> tuple[str, str, Tensor]:
    """Fit with the given memory of each rank; return the strategy, the printed notes and the weights."""
    said: list[str] = []
    patched: Any = planning
    trainer: Any = silent_trainer(strategy=strategy, devices=2, max_steps=3)
    rank = trainer.global_rank
    patched.available_memory = lambda *_: Memory(memories[rank], memories[rank])
    trainer.note = said.append
    try:
        module = Regressor()
        trainer.fit(module, loader(batch_size=2))
    finally:
        patched.available_memory = available_memory
    whole = module.net[0].weight.is_meta
    return trainer.strategy.name, "\n".join(said), torch.empty(0) if whole else weights_of(module)


def test_auto_chooses_the_same_strategy_on_all_ranks_and_trains_the_same() -> None:
    (_, _, expected), _ = run_on_ranks(2, fit_with_memory, "ddp", [GB, GB])
    # ddp needs 129 x 20 bytes and activations, fsdp 129 x 8 and what it gathers.
    found = run_on_ranks(2, fit_with_memory, "auto", [GB, 2500])
    assert [name for name, *_ in found] == ["fsdp", "fsdp"]
    assert "> fsdp" in found[0][1]
    assert "ddp" in found[0][1]
    torch.testing.assert_close(found[0][2], expected)


# ---- documentation ------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[3] / "docs" / "choosing-a-strategy.md"


def documented(precision: str) -> dict[str, list[str]]:
    """Return the cells of the table for a precision, by the name of the strategy."""
    (table,) = re.findall(rf"`{precision}`[^\n]*\n\n(\| strategy \| device .*?)\n\n", PAGE.read_text(), re.DOTALL)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_the_documented_bytes_for_each_parameter_are_those_of_the_formulas(precision: str, ranks: int) -> None:
    tables = documented(precision)
    assert set(tables) == set(LAYOUTS)
    for name, cells in tables.items():
        world = Ranks(1 if name == "single" else ranks)
        needs = footprint(LAYOUTS[name], ModelSize(64_000), world, resolve_precision(precision))
        told = [eval(cell, {"W": ranks}) for cell in cells]
        assert [round(64_000 * each) for each in told] == [needs.device.held, needs.host.held, needs.disk.held], name


def test_a_plan_lets_configure_optimizers_read_the_trainer() -> None:
    class Reading(Regressor):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            total = int(self.trainer.estimated_stepping_batches)
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)]

    module = Reading()
    trainer = silent_trainer(devices=1, max_epochs=2)
    plan = trainer.plan(module, loader(), rehearse="single")
    assert "Optimizer state is counted as Adam's" not in str(plan)
    assert "could not be rehearsed" not in str(plan)
    (row,) = [each for each in plan if each.name == "single"]
    assert row.rank is not None
    with refuses(ConfigurationError, "Reading", "module.trainer"):
        _ = module.trainer
    with refuses(ConfigurationError, "configure_optimizers"):
        _ = trainer.estimated_stepping_batches
