"""What ``self.log`` keeps and under which names: side by side with Lightning, over ranks, and value by value."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from logged import KINDS, Interrupt, counted_collectives, metrics_of, numbers
from messages import refuses
from models import SILENT, loader, network, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import TrainModule
from phalanx.framework.core.errors import ConfigurationError, MetricError
from phalanx.framework.distributed import object_frames
from phalanx.framework.distributed.world import World
from phalanx.framework.metrics.log_arguments import batch_items
from phalanx.framework.metrics.metric_log import MetricLog

Plan = dict[str, list[tuple[str, dict[str, Any]]]]


class Logging(TrainModule):
    """Trains ``network``; logs what it is told to in the hooks it is told of: ``{hook: [(name, arguments), ...]}``."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.net = network()
        self.plan = plan
        self.calls: Counter[str] = Counter()
        self.seen: dict[str, dict[str, float]] = {}

    def write(self, hook: str, scale: float = 1.0) -> None:
        self.calls[hook] += 1
        for name, arguments in self.plan.get(hook, ()):
            self.log(name, scale * self.calls[hook], **arguments)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.write("training_step", loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.write("validation_step", self.loss(batch).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def note(self, hook: str) -> None:
        self.seen[hook] = numbers(self.trainer.callback_metrics)


def _hook(name: str) -> Any:
    def hook(self: Any, *_: Any) -> None:
        if name.endswith("epoch_end"):
            self.note(name)
        self.write(name)

    return hook


HOOKS = (
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
    "on_validation_epoch_end",
)
for _name in HOOKS:
    setattr(Logging, _name, _hook(_name))


def in_lightning(lightning: Any, module: Logging) -> Any:
    """Return a LightningModule with the body of ``Logging``."""
    body = {**vars(Logging), **vars(type(module))}
    body = {name: member for name, member in body.items() if not name.startswith("__")}
    twin = type("InLightning", (lightning.LightningModule,), body)()
    twin.net, twin.plan, twin.calls, twin.seen = network(), module.plan, Counter(), {}
    return twin


SETTINGS: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 1, "log_every_n_steps": 1}
ALL_HOOKS = [*HOOKS, "training_step", "validation_step"]
BOTH = {"on_step": True, "on_epoch": True}
PLANS: dict[str, Plan] = {
    "defaults in every hook": {hook: [(f"in_{hook}", {})] for hook in ALL_HOOKS},
    "step and epoch": {hook: [("both", BOTH)] for hook in ("training_step",)}
    | {"validation_step": [("val_both", {**BOTH, "prog_bar": True})]},
    "flags": {
        "training_step": [
            ("bar", {"prog_bar": True}),
            ("no_logger", {"logger": False}),
            ("bar_both", {"prog_bar": True, "logger": False, **BOTH}),
            ("epoch", {"on_step": False, "on_epoch": True}),
            ("none", {"logger": None}),
        ],
        "validation_step": [("val_bar", {"prog_bar": True, "logger": False})],
    },
    "reductions": {
        hook: [
            (f"{hook}_{fx}", {"reduce_fx": fx, "on_epoch": True, "on_step": False})
            for fx in ("mean", "sum", "min", "max", "avg")
        ]
        + [(f"{hook}_torch", {"reduce_fx": torch.max, "on_epoch": True, "on_step": False})]
        for hook in ("training_step", "validation_step", "on_train_batch_end")
    },
    "batch size": {
        "training_step": [("weighted", {"batch_size": 3, **BOTH}), ("found", BOTH)],
        "validation_step": [("val_weighted", {"batch_size": 3}), ("val_found", {})],
    },
}


@pytest.mark.parametrize(
    ("case", "loaders"),
    [("defaults in every hook", 2), ("step and epoch", 1), ("flags", 1), ("reductions", 2), ("batch size", 1)],
)
def test_names_and_values_are_lightnings(lightning: Any, case: str, loaders: int) -> None:
    ours, theirs = Logging(PLANS[case]), in_lightning(lightning, Logging(PLANS[case]))
    data = [loader(10, 4), *[loader(n, 4) for n in (7, 5)[:loaders]]]
    trainer = silent_trainer(**SETTINGS)
    trainer.fit(ours, data[0], data[1:])
    other = lightning.Trainer(**SETTINGS, **SILENT)
    other.fit(theirs, data[0], data[1:])
    assert ours.calls == theirs.calls
    # Hooks at an epoch's end see its values.
    for hook in ("on_train_epoch_end", "on_validation_epoch_end"):
        assert ours.seen[hook] == pytest.approx(theirs.seen[hook], rel=1e-6), hook
    found, expected = metrics_of(trainer), metrics_of(other)
    for kind in KINDS:
        assert found[kind] == pytest.approx(expected[kind], rel=1e-6), kind


class ByLoader(Logging):
    """Names a metric by its loader."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log(f"x{dataloader_idx}", self.loss(batch).item(), add_dataloader_idx=False, on_step=True, on_epoch=True)
        self.log("y", self.loss(batch).item())


def test_each_loader_has_its_own_metrics_as_in_lightning(lightning: Any) -> None:
    plan: Plan = {"validation_step": [("x", BOTH)], "on_validation_epoch_end": [("all", {})]}
    data = [loader(7, 4), loader(5, 4)]
    for kind in (Logging, ByLoader):
        trainer, other = silent_trainer(), lightning.Trainer(**SILENT)
        found = trainer.validate(kind(plan), data, verbose=False)
        expected = other.validate(in_lightning(lightning, kind(plan)), data, verbose=False)
        assert len(found) == len(expected) == 2
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)


def test_one_name_over_several_loaders_is_one_value() -> None:
    plan: Plan = {"validation_step": [("x", {"add_dataloader_idx": False})]}
    module = Logging(plan)
    (first, second) = silent_trainer().validate(module, [loader(8), loader(4)], verbose=False)
    assert set(first) == {"x"}
    assert second == {}


def test_a_value_logged_at_an_epochs_end_replaces_that_of_the_steps() -> None:
    plan: Plan = {"training_step": [("x", BOTH)], "on_train_epoch_end": [("x", {})]}
    trainer = silent_trainer(max_epochs=3)
    trainer.fit(Logging(plan), loader(8))
    assert trainer.callback_metrics["x"] == 3
    assert trainer.callback_metrics["x_epoch"] != 3


# ---- one call -----------------------------------------------------------------------------------------------------


def log_of(stage: str = "train", world: World | None = None, in_step: bool = True) -> tuple[TrainModule, MetricLog]:
    """Return a module that logs in a step, and where it logs to."""
    module, log = TrainModule(), MetricLog(stage, world or World.single())
    module.log_to(log)
    log.in_step = in_step
    log.batches = 1
    return module, log


def epoch_values(log: MetricLog) -> dict[str, float]:
    values, _ = log.reduce()
    log.finish()
    return {entry.epoch_name: value.item() for entry, value in values.items()}


EPOCH: dict[str, Any] = {"on_step": False, "on_epoch": True}


def test_a_record_does_not_change_with_later_values() -> None:
    module, log = log_of()
    module.log("loss", 1.0, **EPOCH)
    module.log("top", 5.0, reduce_fx="max", **EPOCH)
    record = log.record()
    module.log("loss", 3.0, **EPOCH)
    module.log("top", 9.0, reduce_fx="max", **EPOCH)
    for _ in range(2):
        _, again = log_of()
        again.load_state_dicts([record.state_dict()])
        assert epoch_values(again) == {"loss": 1.0, "top": 5.0}
    assert epoch_values(log) == {"loss": 2.0, "top": 9.0}


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (2, 2.0),
        (True, 1.0),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.float64(0.1), 0.1),
        (np.int64(7), 7.0),
        (np.bool_(True), 1.0),
        (np.array(3.0), 3.0),
        (torch.tensor(3), 3.0),
        (torch.tensor(True), 1.0),
        (torch.tensor([4.0]), 4.0),
        (torch.tensor([[5.0]], dtype=torch.bfloat16), 5.0),
        (torch.tensor(6.0, requires_grad=True), 6.0),
        (math.inf, math.inf),
    ],
    ids=repr,
)
def test_numbers_of_every_kind(value: Any, number: float) -> None:
    module, log = log_of()
    module.log("x", value, on_step=True, on_epoch=True)
    step = log.step_values("logger")["x_step"]
    assert type(step) is float
    assert step == number
    assert epoch_values(log)["x_epoch"] == pytest.approx(number)


@pytest.mark.parametrize("fx", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("values", [[math.nan, 1.0, 2.0], [1.0, math.nan, 2.0], [1.0, 2.0, math.nan]])
def test_nan_stays_nan_at_any_position(fx: str, values: list[float]) -> None:
    module, log = log_of()
    for value in values:
        module.log("x", value, reduce_fx=fx, **EPOCH)
    assert math.isnan(epoch_values(log)["x"])


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("0.5", "str"),
        (b"1", "bytes"),
        (torch.zeros(3), "(3,)"),
        (torch.zeros(0), "(0,)"),
        (torch.zeros(2, device="meta"), "(2,)"),
        (torch.tensor(1j), "complex"),
        (np.zeros(2), "ndarray"),
        ([1.0], "list"),
        ({"a": 1.0}, "dict"),
        (None, "NoneType"),
        (10**400, "int"),
    ],
    ids=repr,
)
def test_values_other_than_numbers_are_refused_in_one_sentence(value: Any, name: str) -> None:
    module, _ = log_of()
    with refuses(MetricError, name) as caught:
        module.log("x", value)
    assert "'x'" in str(caught.value)


class Token:
    """Something that a graph holds."""


class Double(torch.autograd.Function):
    """Doubles; the graph holds a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2, None


def doubled(x: Tensor) -> tuple[Tensor, weakref.ref[Token]]:
    """Return the double of a tensor, and what is alive as long as its graph is."""
    token = Token()
    loss: Tensor = Double.apply(x, token)  # type: ignore[no-untyped-call]
    return loss, weakref.ref(token)


def test_no_graph_is_kept_alive() -> None:
    module, log = log_of()
    loss, graph = doubled(torch.tensor(3.0, requires_grad=True))
    module.log("loss", loss, on_step=True, on_epoch=True)
    assert graph() is not None
    del loss
    gc.collect()
    assert graph() is None
    assert log.step_values("logger") == {"loss_step": 6.0}


def test_a_tensor_changed_in_place_later_was_logged_as_it_was() -> None:
    module, log = log_of()
    buffer = torch.tensor(1.0)
    for _ in range(3):
        module.log("x", buffer, on_step=True, on_epoch=True, batch_size=1)
        buffer += 1
    assert log.step_values("logger") == {"x_step": 3.0}
    assert epoch_values(log) == {"x_epoch": 2.0}


def test_a_tensor_changed_between_two_names_is_logged_as_it_is_at_each() -> None:
    module, log = log_of()
    value = torch.tensor(1.0)
    version = value._version
    module.log("before", value)
    # Does not count as a change in place, like `all_reduce` and a write through NumPy.
    value.data.add_(1)
    assert value._version == version
    module.log("after", value)
    assert log.step_values("logger") == {"before": 1.0, "after": 2.0}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"prog_bar": True}),
        ({"prog_bar": True}, {}),
        ({"reduce_fx": "mean"}, {"reduce_fx": "sum"}),
        ({}, {"on_epoch": True}),
        ({}, {"logger": False}),
    ],
)
def test_other_arguments_for_a_name_are_refused(first: dict[str, Any], second: dict[str, Any]) -> None:
    module, _ = log_of()
    module.log("x", 1.0, **first)
    with refuses(ConfigurationError, "'x'"):
        module.log("x", 1.0, **second)


def test_the_same_reduction_may_be_written_differently() -> None:
    module, log = log_of()
    for fx in ("sum", torch.sum, sum, "SUM"):
        module.log("x", 1.0, reduce_fx=fx, **EPOCH)
    assert epoch_values(log) == {"x": 4.0}


@pytest.mark.parametrize(
    ("arguments", "in_step", "name"),
    [
        ({"reduce_fx": "means"}, True, "reduce_fx='means'"),
        ({"reduce_fx": lambda values: values}, True, "reduce_fx=<function"),
        ({"reduce_fx": [1]}, True, "reduce_fx=[1]"),
        ({"on_step": True}, False, "on_epoch=True"),
        ({"on_step": False, "on_epoch": False}, True, "on_step and on_epoch"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], in_step: bool, name: str) -> None:
    module, _ = log_of(in_step=in_step)
    with refuses(ConfigurationError, name):
        module.log("x", 1.0, **arguments)


def test_logging_outside_a_run_is_ignored() -> None:
    TrainModule().log("x", 1.0)


@pytest.mark.parametrize("on_host", [True, False])
def test_tensors_are_read_the_same_whatever_the_build_of_torch(monkeypatch: pytest.MonkeyPatch, on_host: bool) -> None:
    module, log = log_of()
    monkeypatch.setattr(log, "_host_only", on_host)
    for name, value in {"float": 0.5, "double": 0.1, "int": 3}.items():
        module.log(name, torch.tensor(value, dtype=torch.float64 if name == "double" else None))
    module.log("meta", torch.zeros((), device="meta"))
    values = log.step_values("logger")
    assert values.pop("meta").is_meta
    assert values == {"float": 0.5, "double": 0.1, "int": 3.0}
    with refuses(MetricError, "'several'", "(2,)"):
        module.log("several", torch.zeros(2))


def test_a_weight_of_zero_adds_nothing() -> None:
    module, log = log_of()
    module.log("x", math.nan, batch_size=0, **EPOCH)
    module.log("x", 3.0, batch_size=2, **EPOCH)
    module.log("none", math.nan, batch_size=0, **EPOCH)
    values = epoch_values(log)
    assert values["x"] == 3.0
    assert math.isnan(values["none"])


@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16])
def test_values_are_of_the_default_dtype_but_never_half(default: torch.dtype) -> None:
    torch.set_default_dtype(default)
    try:
        module, log = log_of()
        module.log("x", 0.1, **EPOCH)
        (value,) = log.reduce()[0].values()
    finally:
        torch.set_default_dtype(torch.float32)
    assert value.dtype == (torch.float64 if default is torch.float64 else torch.float32)


@dataclass
class Item:
    name: str
    image: Tensor


@pytest.mark.parametrize(
    ("batch", "items"),
    [
        (torch.zeros(5, 2), 5),
        (torch.tensor(1.0), 1),
        ((torch.zeros(3, 1), torch.zeros(3)), 3),
        ([torch.zeros(4), "text"], 4),
        ({"ids": {"x": torch.zeros(6, 2)}, "n": 1}, 6),
        (Item("a", torch.zeros(2, 3)), 2),
        (["a", "b", "c"], 3),
        ({"text": ["abc", "d"], "label": [1, 2]}, 2),
        ({"text": ["abc", "d", "e"], "label": torch.zeros(3)}, 3),
        ([np.zeros((7, 2)), np.zeros(7)], 7),
        ([], 1),
        (None, 1),
        (3.5, 1),
    ],
    ids=str,
)
def test_items_of_a_batch(batch: Any, items: int) -> None:
    assert batch_items(batch) == items


# ---- values on a device -------------------------------------------------------------------------------------------


class Elsewhere(Tensor):
    """A tensor that says it is on a device, and counts how often somebody waits for that."""

    waits = 0
    is_cpu = False

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in ("item", "tolist", "__float__", "__bool__", "cpu", "numpy"):
            Elsewhere.waits += 1
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def elsewhere(number: float, **arguments: Any) -> Tensor:
    return torch.tensor(number, **arguments).as_subclass(Elsewhere)


@pytest.mark.parametrize("count", [3, 1000])
def test_reading_waits_for_a_device_once(count: int) -> None:
    module, log = log_of()
    Elsewhere.waits = 0
    expected = {"mean": 0.0, "sum": 0.0, "max": 0.0}
    for index in range(count):
        for fx in expected:
            module.log(fx, elsewhere(index + 0.5), reduce_fx=fx, batch_size=index, **EPOCH)
        module.log("step", elsewhere(float(index)), prog_bar=True)
        module.log("weighed", 2.0 if index else 1e9, batch_size=elsewhere(index), **EPOCH)
    assert Elsewhere.waits == 0
    steps = torch.arange(count, dtype=torch.float64)
    expected = {
        "mean": ((steps + 0.5) * steps).sum().item() / steps.sum().item(),
        "sum": (steps + 0.5).sum().item(),
        "max": count - 0.5,
        "weighed": 2.0,
    }
    assert epoch_values(log) == {name: torch.tensor(value).item() for name, value in expected.items()}
    # What is waited for was stacked: not one wait for each value.
    assert Elsewhere.waits <= 4 * (1 + count // 256) * 2


def test_a_device_tensor_is_copied_and_its_graph_released() -> None:
    module, log = log_of()
    loss, graph = doubled(elsewhere(1.0).requires_grad_())
    assert type(loss) is Elsewhere
    module.log("x", loss, on_step=True, on_epoch=True)
    with torch.no_grad():
        loss.add_(5)
    del loss
    gc.collect()
    assert graph() is None
    assert float(log.step_values("logger")["x_step"]) == 2.0
    assert epoch_values(log) == {"x_epoch": 2.0}


# ---- over ranks ---------------------------------------------------------------------------------------------------


def many_metrics(count: int) -> tuple[list[str], dict[str, float]]:
    module, log = log_of(world=World.from_environment("cpu"))
    rank = log.world.rank
    for index in range(count):
        fx = ("mean", "sum", "min", "max")[index % 4]
        for step in range(3):
            module.log(f"metric_{index}", 0.1 * index + step + rank, reduce_fx=fx, batch_size=1 + rank, **EPOCH)
    log.world.barrier()
    with counted_collectives() as calls:
        values = epoch_values(log)
    return calls, values


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (3, 200)])
def test_one_collective_for_all_metrics_of_an_epoch(ranks: int, count: int) -> None:
    results = run_on_ranks(ranks, many_metrics, count)
    for calls, values in results:
        assert calls == ["all_gather"]
        assert len(values) == count
        assert values == results[0][1]
    weights = range(1, ranks + 1)
    mean = sum(w * (1 + w - 1) for w in weights) / sum(weights)
    assert results[0][1]["metric_0"] == pytest.approx(mean)


def buffer_sizes(counts: list[int]) -> list[int]:
    """Return the bytes that each epoch's collectives send, of epochs with these numbers of metrics."""
    module, log = log_of(world=World.from_environment("cpu"))
    log.world.barrier()  # Building the control group sends objects too.
    sent: list[int] = []
    gather = object_frames._gather_bytes

    def counted(source: bytearray, group: Any) -> list[memoryview]:
        sent[-1] += len(source)
        return gather(source, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_frames, "_gather_bytes", counted)
        for epoch, count in enumerate(counts):
            sent.append(0)
            for index in range(count):
                module.log(f"metric_{index}", 0.1 * index + epoch, batch_size=2, **EPOCH)
            values = epoch_values(log)
            assert values == pytest.approx({f"metric_{index}": 0.1 * index + epoch for index in range(count)})
    return sent


def test_an_epoch_with_more_metrics_than_before_enlarges_the_buffers_once() -> None:
    for sizes in run_on_ranks(2, buffer_sizes, [1, 60, 60, 1]):
        first, grown, then, last = sizes
        assert first == 16 * 1024
        assert grown > 512
        assert grown - 512 < then == last < first


def fitted(ranks: int, plan: Plan, count: int) -> Any:
    module = Logging(plan)
    trainer = silent_trainer(devices=ranks, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, loader(12, 2), loader(count, 4))
    return metrics_of(trainer)


@pytest.mark.parametrize("count", [1, 22])
def test_hooks_log_on_every_rank_with_data_or_without(count: int) -> None:
    plan: Plan = {
        "validation_step": [("val", {"prog_bar": True}), ("hidden", {"logger": False})],
        "on_validation_epoch_end": [("end", {}), ("total", {"reduce_fx": "sum"})],
        "on_train_epoch_end": [("train_end", {})],
        "on_train_epoch_start": [("train_start", {})],
    }
    results = run_on_ranks(3, fitted, 3, plan, count)
    for found in results:
        assert found == results[0]
        assert found["callback_metrics"]["total"] == 3.0
        assert found["callback_metrics"]["end"] == found["callback_metrics"]["train_end"] == 1.0
        assert set(found["progress_bar_metrics"]) == {"val"}
        assert "hidden" not in found["logged_metrics"]


class Unlike(Logging):
    """Logs under a name of its own on rank 1."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_los" if self.global_rank == 1 else "val_loss", 1.0)


class UnlikeReduction(Logging):
    """Reduces otherwise on rank 1."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("x", 1.0, reduce_fx="max" if self.global_rank == 1 else "min")


def refused(kind: type[Logging], count: int) -> str:
    trainer = silent_trainer(devices="auto")
    try:
        trainer.validate(kind({}), loader(count, 2), verbose=False)
    except MetricError as error:
        return str(error)
    return "nothing"


def test_unlike_names_are_an_error_on_every_rank_that_names_key_and_rank() -> None:
    messages = run_on_ranks(3, refused, Unlike, 12)
    assert len(set(messages)) == 1
    for part in ("rank 0", "rank 1", "'val_los"):
        assert part in messages[0]


def test_unlike_reductions_are_an_error_on_every_rank() -> None:
    messages = run_on_ranks(2, refused, UnlikeReduction, 12)
    assert len(set(messages)) == 1
    assert "rank 1 logged 'x' in validate as 'max', rank 0 as 'min'" in messages[0]


def test_a_rank_without_data_need_not_log() -> None:
    assert run_on_ranks(2, refused, Unlike, 2) == ["nothing", "nothing"]


class OnRankZero(Logging):
    """Logs a name on rank 0 alone: only called there, or called everywhere."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("everywhere", float(self.global_rank))
        self.log("called_everywhere", float(self.global_rank), rank_zero_only=True)
        if self.global_rank == 0:
            self.log("zero", 7.0, rank_zero_only=True)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.log("at_end", 3.0, rank_zero_only=True)


def on_rank_zero(ranks: int) -> dict[str, float]:
    trainer = silent_trainer(devices=ranks)
    trainer.validate(OnRankZero({}), loader(4 * ranks, 4), verbose=False)
    return metrics_of(trainer)["callback_metrics"]


def test_rank_zero_only_is_logged_by_rank_zero_and_seen_by_all() -> None:
    expected = {"everywhere": 0.5, "called_everywhere": 0.0, "zero": 7.0, "at_end": 3.0}
    assert run_on_ranks(2, on_rank_zero, 2) == [expected] * 2
    assert on_rank_zero(1) == {**expected, "everywhere": 0.0}


# ---- where nothing is gathered ------------------------------------------------------------------------------------


class Late(Logging):
    def on_validation_end(self) -> None:
        self.log("late", 1.0)


class Predicting(Logging):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("x", 1.0)


def test_hooks_where_nothing_is_gathered_refuse() -> None:
    with refuses(MetricError, "'late'", "on_validation_epoch_end"):
        silent_trainer().validate(Late({}), loader(4), verbose=False)
    with refuses(MetricError, "predict_step"):
        silent_trainer().predict(Predicting({}), loader(4))


# ---- an epoch interrupted -----------------------------------------------------------------------------------------


RESUMED: Plan = {
    "training_step": [
        ("loss", BOTH),
        ("sum", {"reduce_fx": torch.sum, **EPOCH}),
        ("max", {"reduce_fx": "max", **EPOCH}),
        ("weighted", {"batch_size": 0.1, **EPOCH}),
    ],
    "on_train_epoch_start": [("start", {})],
}


class Constant(Logging):
    """Logs values that follow from the step alone."""

    def write(self, hook: str, scale: float = 1.0) -> None:
        for name, arguments in self.plan.get(hook, ()):
            self.log(name, math.sin(1 + self.global_step) if hook == "training_step" else 1.0, **arguments)


def interrupted(directory: Path) -> tuple[dict[str, float], dict[str, float]]:
    path = directory / "middle.ckpt"
    whole = silent_trainer(devices=2, max_epochs=2, callbacks=[Interrupt(path, 3)])
    whole.fit(Constant(RESUMED), loader(32, 2))
    resumed = silent_trainer(devices=2, max_epochs=2)
    resumed.fit(Constant(RESUMED), loader(32, 2), ckpt_path=path)
    return metrics_of(whole)["callback_metrics"], metrics_of(resumed)["callback_metrics"]


def test_an_epochs_sums_survive_a_checkpoint_in_its_middle(tmp_path: Path) -> None:
    for whole, resumed in run_on_ranks(2, interrupted, tmp_path):
        assert whole == resumed
