"""Model FLOPs against the formulas of transformers and counts by hand; peaks of devices."""

from __future__ import annotations

import functools
import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from small_fits import Tiny, loader, quiet_trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import phalanx
from phalanx import TrainModule
from phalanx.framework.profiling.device_peaks import device_peak_flops, peak_flops
from phalanx.framework.profiling.flop_count import FlopCount


def example() -> Any:
    """Return the module of examples/gpt.py."""
    path = Path(phalanx.__file__).parent / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("gpt_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gpt_flops(layers: int, width: int, length: int, **settings: Any) -> tuple[float, int]:
    """Return the FLOPs of a token, and the parameters of the matrix products, of the example's model."""
    module = example().LanguageModel(layers=layers, width=width, heads=4, context=length)
    tokens = torch.randint(0, 128, (3, length))
    trainer = quiet_trainer(Path(), [], max_epochs=1, **settings)
    batches: Any = [(tokens, tokens)] * 4
    trainer.fit(module, DataLoader(batches, batch_size=None))
    assert trainer.throughput is not None
    assert trainer.throughput.unit == "tokens"
    assert trainer.throughput.flops_per_unit is not None
    embedded = module.gpt.positions.weight.numel()
    return trainer.throughput.flops_per_unit, sum(each.numel() for each in module.parameters()) - embedded


@functools.cache
def plain_flops(layers: int) -> tuple[float, int]:
    """Return what a plain fit in one process counts."""
    return gpt_flops(layers, 32, 16)


def test_a_gpt_takes_six_flops_for_each_parameter_and_token_and_attention_adds_its_own() -> None:
    layers, width, length = 2, 256, 128
    flops, parameters = gpt_flops(layers, width, length)
    assert flops == pytest.approx(6 * parameters + 12 * layers * width * length, rel=0.01)
    assert flops > 6.4 * parameters


@pytest.mark.parametrize("settings", [{"precision": "bf16-mixed"}, {"accumulate_grad_batches": 3}])
def test_precision_and_accumulation_do_not_change_the_flops_of_a_token(settings: dict[str, Any]) -> None:
    assert gpt_flops(1, 32, 16, **settings) == plain_flops(1)


class Double(torch.autograd.Function):
    """A product with a matrix, as a function with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return (x * 1.0) @ (weight * 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.T, x.T @ gradients[0]


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


# Of a batch of one: a product of the first layer takes 2 * 4 * 8 = 64, one of the second 2 * 8 * 2 = 32.
FIRST, SECOND = 64, 32


@pytest.mark.parametrize(
    ("kind", "flops"),
    [
        ("plain", 2 * FIRST + 3 * SECOND),
        ("input needs a gradient", 3 * FIRST + 3 * SECOND),
        ("first frozen", FIRST + 2 * SECOND),
        ("second frozen", 2 * FIRST + 2 * SECOND),
        ("no gradients", FIRST + SECOND),
        ("checkpointed", 2 * FIRST + 3 * SECOND),
        ("checkpointed, reentrant", 3 * FIRST + 3 * SECOND),
        ("own function", 3 * 2 * 4 * 4),
    ],
)
def test_flops_by_hand(kind: str, flops: int) -> None:
    module, x = Parts(), torch.ones(1, 4)
    if kind in ("input needs a gradient", "checkpointed, reentrant", "own function"):
        x.requires_grad_()
    for name in ("first", "second"):
        if kind == f"{name} frozen":
            getattr(module, name).requires_grad_(False)
    count = FlopCount()
    with count:
        if kind == "no gradients":
            with torch.no_grad():
                module(x)
        elif kind == "own function":
            Double.apply(x, torch.ones(4, 4, requires_grad=True))  # type: ignore[no-untyped-call]
        elif kind.startswith("checkpointed"):
            checkpoint(module, x, use_reentrant="reentrant" in kind)
        else:
            module(x)
    assert count.total == flops


def test_autograd_notices_that_tensors_of_a_list_were_changed() -> None:
    weight, factor = torch.ones(2, requires_grad=True), torch.ones(2)
    with FlopCount():
        loss = (weight * factor).sum()
        torch._foreach_mul_([factor], 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_failing_formula_leaves_the_flops_out(monkeypatch: pytest.MonkeyPatch) -> None:
    count = FlopCount()
    count._formulas[torch.ops.aten.relu] = lambda *args, **kwargs: 1 // 0
    with count:
        assert Parts()(torch.ones(1, 4)).relu().shape == (1, 2)
    assert count.total is None
    assert FlopCount().total is None


class Watching(Tiny):
    """Notes whether operations are being observed in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.observed: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.observed.append(torch._C._len_torch_dispatch_stack() > 0)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("window", [1, 2])
def test_only_the_first_window_is_observed(window: int, tmp_path: Path) -> None:
    module = Watching()
    quiet_trainer(tmp_path, [], max_epochs=2, accumulate_grad_batches=window).fit(module, loader(24))
    assert module.observed == [True] * window + [False] * (12 - window)


def test_counting_does_not_change_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    for counts in (True, False):
        torch.manual_seed(0)
        module = Watching()
        trainer = quiet_trainer(tmp_path, [], max_epochs=1)
        if not counts:
            monkeypatch.setattr("phalanx.framework.trainer.assembly.FlopCount", lambda: None)
        trainer.fit(module, loader())
        assert module.observed[0] is counts
        trained.append(module.layer.weight.detach().clone())
    assert torch.equal(*trained)


@pytest.mark.parametrize(("blocks", "window"), [(True, 2), (False, 1)], ids=["blocks", "whole"])
def test_compiled_parts_take_the_same_flops(blocks: bool, window: int) -> None:
    compiled = {"backend": "eager", "blocks": blocks}
    assert gpt_flops(2, 32, 16, compile=compiled, accumulate_grad_batches=window) == plain_flops(2)


def on_ranks(strategy: str, compiled: dict[str, Any] | None) -> tuple[float, int]:
    return gpt_flops(2, 32, 16, devices=2, strategy=strategy, use_distributed_sampler=False, compile=compiled)


@pytest.mark.parametrize(("strategy", "compiled"), [("ddp", None), ("fsdp", {"backend": "eager", "blocks": True})])
def test_strategies_do_not_change_the_flops_of_a_token(strategy: str, compiled: dict[str, Any] | None) -> None:
    assert run_on_ranks(2, on_ranks, strategy, compiled) == [plain_flops(2)] * 2


class Random(Tiny):
    """Has random numbers, statistics and state in Python in a compiled part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.last: Any = None
        self.auxiliary: list[Any] = []
        self.seen: dict[str, Any] = {"calls": 0, "means": []}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.auxiliary.clear()
        loss = self(batch[0]).square().mean()
        assert len(self.auxiliary) == 1
        return loss + self.auxiliary[0] + 0.0 * self.last.sum()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.last = y.detach()
        self.auxiliary.append(y.mean() * random.random())
        self.seen["calls"] += 1
        self.seen["means"].append(y.detach().mean())
        return y


def test_counting_compiled_parts_changes_neither_weights_nor_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("planted")

    states, graphs, flops = [], [], []
    for counting in ("succeeds", "fails", "is left out"):
        built: list[Any] = []

        def backend(graph: Any, example_inputs: Any, built: list[Any] = built) -> Any:
            built.append(graph)
            return graph.forward

        torch._dynamo.reset()
        torch.manual_seed(0)
        random.seed(0)
        module = Random()
        if counting == "is left out":
            monkeypatch.setattr("phalanx.framework.trainer.assembly.FlopCount", lambda: None)
        elif counting == "fails":
            monkeypatch.setattr("phalanx.framework.loop.compiled_flops._count_without_data", refuse)
        trainer = quiet_trainer(tmp_path, [], max_epochs=2, compile={"backend": backend, "blocks": False})
        trainer.fit(module, loader(24))
        assert trainer.throughput is not None
        flops.append(trainer.throughput.flops_per_unit)
        states.append(module.state_dict() | {"random": torch.tensor(random.random())})
        assert (module.seen["calls"], len(module.seen["means"])) == (12, 12)
        graphs.append(len(built))
    for state in states[:2]:
        assert all(torch.equal(one, other) for one, other in zip(state.values(), states[2].values(), strict=True))
    assert graphs[0] == graphs[1] == graphs[2] > 0
    # Of a sample: the input needs no gradient.
    assert flops == [2 * (2 * 4 * 8) + 3 * (2 * 8 * 2), None, None]


class Multiplying(torch.optim.SGD):
    """An optimizer whose update computes a product, which is not one of the model."""

    def step(self, closure: Any = None) -> Any:
        torch.ones(64, 64) @ torch.ones(64, 64)
        return super().step(closure)


class Alternating(TrainModule):
    """Trains its second part in every batch, and both parts in every fifth one, of samples that are three units."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.parts = Parts()

    def batch_weight(self, batch: Any) -> int:
        return 3 * len(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        with torch.no_grad():
            hidden = self.parts.first(batch[0])
        self.manual_backward(self.parts.second(hidden).square().mean())
        second.step()
        if batch_idx % 5 == 0:
            self.manual_backward(self.parts(batch[0]).square().mean())
            first.step()
            second.step()
        first.zero_grad()
        second.zero_grad()

    def configure_optimizers(self) -> Any:
        return [Multiplying(part.parameters(), lr=0.01) for part in (self.parts.first, self.parts.second)]


def alternating_flops(root: str, batches: int, **settings: Any) -> float | None:
    trainer = quiet_trainer(Path(root), [], max_epochs=1, **settings)
    trainer.fit(Alternating(), loader(4 * batches, 4 // settings.get("devices", 1)))
    assert trainer.throughput is not None
    return trainer.throughput.flops_per_unit


# In every batch: a product of the first layer without a gradient, and those of the second layer.
_ALWAYS, _BOTH = FIRST + 2 * SECOND, 2 * FIRST + 3 * SECOND


@pytest.mark.parametrize(
    ("batches", "share", "compiled"), [(40, 1 / 5, None), (7, 2 / 7, {"backend": "eager", "blocks": False})]
)
def test_flops_of_manual_optimization_are_those_of_an_average_batch(
    batches: int, share: float, compiled: Any, tmp_path: Path
) -> None:
    expected = (_ALWAYS + share * _BOTH) / 3
    assert alternating_flops(str(tmp_path), batches, compile=compiled) == pytest.approx(expected)


def alternating_on_ranks(root: str) -> float | None:
    return alternating_flops(root, 40, devices=2, strategy="fsdp")


def test_strategies_do_not_change_the_flops_of_manual_optimization(tmp_path: Path) -> None:
    found = run_on_ranks(2, alternating_on_ranks, str(tmp_path))
    assert found == pytest.approx([(_ALWAYS + _BOTH / 5) / 3] * 2)


def test_a_module_that_the_user_has_compiled_is_not_counted(tmp_path: Path) -> None:
    module = Watching()
    module.layer.compile(backend="eager")
    check_not_counted(module, tmp_path, {})


def test_barebones_fits_are_not_observed(tmp_path: Path) -> None:
    settings: dict[str, Any] = dict.fromkeys(("enable_checkpointing", "num_sanity_val_steps", "logger"))
    settings |= {"enable_progress_bar": None, "enable_model_summary": None, "barebones": True}
    check_not_counted(Watching(), tmp_path, settings)


def check_not_counted(module: Watching, tmp_path: Path, settings: dict[str, Any]) -> None:
    trainer = quiet_trainer(tmp_path, [], max_epochs=1, **settings)
    trainer.fit(module, loader())
    assert not any(module.observed)
    assert trainer.throughput is not None
    assert trainer.throughput.flops_per_unit is None


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, False, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, False, 756.0),
        ("NVIDIA H200", torch.float32, True, 494.7),
        ("NVIDIA H200", torch.float32, False, 66.9),
        ("NVIDIA A100-SXM4-80GB", torch.float16, False, 312.0),
        ("NVIDIA A10", torch.float16, False, 125.0),
        ("NVIDIA L40S", torch.bfloat16, False, 362.1),
        ("NVIDIA GB200", torch.bfloat16, False, 2500.0),
        ("Tesla V100-SXM2-32GB", torch.float16, True, 125.0),
        ("Tesla V100-SXM2-32GB", torch.bfloat16, True, None),
        ("NVIDIA A100-SXM4-80GB", torch.float64, False, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16, False, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, False, None),
        ("NVIDIA A1000", torch.bfloat16, False, None),
    ],
)
def test_peaks_of_devices(name: str, dtype: torch.dtype, tf32: bool, teraflops: float | None) -> None:
    found = peak_flops(name, dtype, tf32)
    assert found == (None if teraflops is None else pytest.approx(teraflops * 1e12))
    assert device_peak_flops(torch.device("cpu"), dtype) is None
