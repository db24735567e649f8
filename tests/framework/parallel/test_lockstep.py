"""Strategies whose passes hold collectives: no rank may run fewer of them than others, whatever its data and steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from messages import refuses
from models import network, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from phalanx import Callback, TrainModule
from phalanx.framework.core.degrees import Degrees
from phalanx.framework.core.errors import LoopError
from phalanx.framework.parallel.zero_backward import CallWatch
from phalanx.strategies.ddp import DDPStrategy

LR = 0.2


def strategy(name: str) -> Any:
    return InPairs() if name == "pairs" else name


# ---- training -------------------------------------------------------------------------------------------------------


class Fickle(TrainModule):
    """Has no loss where ``rule`` says so, before or after its model has run; notes what it was given."""

    def __init__(self, rule: str, when: str) -> None:
        super().__init__()
        self.net = network()
        self.rule, self.when = rule, when
        self.given: list[tuple[int, bool, Tensor, Tensor]] = []

    def silent(self, index: int) -> bool:
        rank = self.global_rank
        silent: bool = {
            "never": False,
            "alternate": (index + rank) % 2 == 0,
            "together": index in (0, 2, 3),
            "one rank": rank == 1 and index > 0,
            "first": rank == 0 and index < 3,
        }[self.rule]
        return silent

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Stand-ins are not seen here.
        self.given.append((batch_idx, not self.silent(batch_idx), batch["x"], batch["y"]))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        # Takes the batch apart, as many a step does.
        y, x = batch.pop("y"), batch.pop("x")
        if self.when == "before" and self.silent(batch_idx):
            return None
        loss = nn.functional.mse_loss(self.net(x), y)
        if self.when == "after" and self.silent(batch_idx):
            return None
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def pairs(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, generator=generator)
    return [{"x": row, "y": torch.sin(row.sum(0, keepdim=True))} for row in x]


class Items(IterableDataset[Any]):
    """The same without a length."""

    def __init__(self, count: int) -> None:
        self.rows = pairs(count)

    def __iter__(self) -> Any:
        return iter(self.rows)


Given = list[tuple[int, bool, Tensor, Tensor]]


def fickle(
    name: str, ranks: int, rule: str, when: str, window: int, count: int, length: bool, kind: type[Fickle] | None = None
) -> tuple[int, Given, list[Tensor]]:
    module = (kind or Fickle)(rule, when)
    data = DataLoader(pairs(count) if length else Items(count), batch_size=2)  # type: ignore[arg-type]
    trainer = silent_trainer(devices=ranks, strategy=name, max_epochs=1, accumulate_grad_batches=window)
    trainer.fit(module, data)
    assert not module._forward_hooks
    assert not module.net._forward_hooks
    weights = [parameter.detach() for parameter in module.net.parameters()]
    return trainer.global_step, module.given, weights


def by_hand(ranks: list[Given], window: int) -> tuple[int, list[Tensor]]:
    """Train on what all ranks were given, in one process: a batch without a loss keeps its weight in the mean."""
    net = network()
    steps = 0
    last = max(index for given in ranks for index, *_ in given)
    for first in range(0, last + 1, window):
        batches = [item for given in ranks for item in given if first <= item[0] < first + window]
        if not any(counts for _, counts, *_ in batches):
            continue
        net.zero_grad()
        for _, counts, x, y in batches:
            if counts:
                (nn.functional.mse_loss(net(x), y) / len(batches)).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.sub_(LR * parameter.grad)
        steps += 1
    return steps, [parameter.detach() for parameter in net.parameters()]


def check_fickle(results: list[tuple[int, Given, list[Tensor]]], window: int, count: int) -> None:
    steps, expected = by_hand([given for _, given, _ in results], window)
    seen = torch.cat([x for _, given, _ in results for _, _, x, _ in given])
    assert sorted(seen[:, 0].tolist()) == sorted(row["x"][0].item() for row in pairs(count))
    for rank, (own_steps, _, weights) in enumerate(results):
        assert own_steps == steps
        for weight, other in zip(weights, expected, strict=True):
            if rank and weight.is_meta:
                continue  # rank 0 alone gets whole weights
            torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "ranks", "window", "when", "rule"),
    [
        *(("fsdp", 3, 3, "before", rule) for rule in ("alternate", "together", "one rank", "first")),
        *(("fsdp", 3, 3, "after", rule) for rule in ("alternate", "together", "one rank", "first")),
        *(("single", 1, 2, "before", "together"), ("single", 1, 2, "after", "alternate")),
        *(("ddp", 3, 3, "before", "alternate"), ("ddp", 3, 3, "after", "one rank"), ("ddp", 2, 1, "before", "first")),
        ("ddp_find_unused_parameters_true", 2, 2, "before", "first"),
        ("ddp_find_unused_parameters_true", 2, 2, "after", "alternate"),
        *(("fsdp", 2, 1, "before", "together"), ("fsdp", 2, 1, "after", "alternate")),
        *(("zero2", 2, 3, "before", "alternate"), ("zero2", 2, 3, "after", "together")),
        *(("zero3", 2, 3, "before", "one rank"), ("zero3", 2, 3, "after", "first")),
    ],
)
def test_a_step_may_return_none_on_any_rank_at_any_time(
    name: str, ranks: int, window: int, when: str, rule: str
) -> None:
    check_fickle(run_on_ranks(ranks, fickle, name, ranks, rule, when, window, 29, True), window, 29)


@pytest.mark.parametrize(
    ("name", "ranks", "count", "length"),
    [
        *(("fsdp", 3, 1, True), ("fsdp", 3, 1, False), ("fsdp", 3, 5, False), ("fsdp", 3, 13, True)),
        *(("zero1", 2, 3, True), ("zero2", 3, 1, True), ("zero2", 3, 13, False), ("zero3", 2, 1, False)),
        ("zero3", 2, 5, True),
    ],
)
def test_ranks_may_have_any_number_of_batches_or_none_at_all(name: str, ranks: int, count: int, length: bool) -> None:
    check_fickle(run_on_ranks(ranks, fickle, name, ranks, "never", "before", 2, count, length), 2, count)


class OwnUpdate(Fickle):
    """Calls the optimizer in hooks of its own."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        assert optimizer.param_groups[0]["lr"] == LR
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero1"])
def test_hooks_of_the_update_may_be_the_users(name: str) -> None:
    check_fickle(run_on_ranks(2, fickle, name, 2, "together", "before", 2, 24, True, OwnUpdate), 2, 24)


# ---- layers that exchange statistics --------------------------------------------------------------------------------


class Normalised(Fickle):
    def __init__(self, rule: str, when: str) -> None:
        super().__init__(rule, when)
        self.net.insert(1, nn.BatchNorm1d(16))


def normalised(rule: str, when: str, count: int) -> tuple[int, int, Tensor, Tensor]:
    module = Normalised(rule, when)
    trainer = silent_trainer(devices=dist.get_world_size(), max_epochs=1, sync_batchnorm=True)
    trainer.fit(module, DataLoader(pairs(count), batch_size=4))  # type: ignore[arg-type]
    assert type(module.net[1]) is nn.BatchNorm1d
    mean = module.net[1].running_mean
    assert isinstance(mean, Tensor)
    return trainer.global_step, sum(len(x) for _, _, x, _ in module.given), weights_of(module), mean


# Four samples are one batch, which the first rank has.
@pytest.mark.parametrize(
    ("when", "rule", "count"),
    [
        *(("before", "together", 42), ("before", "first", 42), ("after", "alternate", 42), ("after", "one rank", 42)),
        *(("before", "never", 4), ("before", "first", 4), ("after", "first", 4)),
    ],
)
def test_shared_statistics_stay_the_same_on_all_ranks_whatever_steps_return(when: str, rule: str, count: int) -> None:
    (steps, _, weights, mean), *others = results = run_on_ranks(3, normalised, rule, when, count, timeout=30)
    assert sum(samples for _, samples, *_ in results) == count
    for other_steps, _, other_weights, other_mean in others:
        assert other_steps == steps
        assert torch.equal(other_weights, weights)
        assert torch.equal(other_mean, mean)


# ---- activations that are not finite --------------------------------------------------------------------------------


class Overflowing(Fickle):
    """Gives no loss where its activations are infinite, in front of and behind layers that reduce gradients."""

    def __init__(self, rule: str, when: str) -> None:
        super().__init__(rule, when)
        self.net.insert(2, Explosive(self))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.explodes = self.silent(batch_idx)
        return super().training_step(batch, batch_idx)


class Explosive(nn.Module):
    """Makes infinite activations with infinite derivatives where its owner says so."""

    owner: Overflowing

    def __init__(self, owner: Overflowing) -> None:
        super().__init__()
        self.__dict__["owner"] = owner

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0).abs().rsqrt() * x + x.exp() * math.inf if self.owner.explodes else x


@pytest.mark.parametrize("name", ["fsdp", "zero1", "zero3"])
def test_infinite_activations_of_a_step_without_a_loss_reach_no_other_rank(name: str) -> None:
    check_fickle(run_on_ranks(2, fickle, name, 2, "alternate", "after", 1, 24, True, Overflowing), 1, 24)


# ---- what a stand-in leaves as it was -------------------------------------------------------------------------------


class Tidy(Fickle):
    """Draws random numbers, counts in a buffer and in a metric, in each pass."""

    counted: Tensor

    def __init__(self) -> None:
        super().__init__("never", "before")
        from torchmetrics import MeanMetric

        self.register_buffer("counted", torch.zeros(()))
        self.mean = MeanMetric()
        self.drawn: list[float] = []
        self.ended: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counted += 1
        self.drawn.append(torch.rand(()).item())
        self.mean.update(batch["x"][:, 0])
        self.log("mean", self.mean, on_epoch=True)
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ended.append(batch_idx)


def tidy(name: str) -> tuple[float, list[float], list[int], float]:
    module = Tidy()
    trainer = silent_trainer(devices=2, strategy=strategy(name), max_epochs=1, accumulate_grad_batches=4)
    # Rank 0 gets one batch more.
    trainer.fit(module, DataLoader(pairs(25), batch_size=4))  # type: ignore[arg-type]
    return module.counted.item(), module.drawn, module.ended, trainer.callback_metrics["mean"].item()


def test_a_filler_batch_is_invisible_to_hooks_and_metrics() -> None:
    results = run_on_ranks(2, tidy, "fsdp", timeout=30)
    mean = torch.stack([row["x"] for row in pairs(25)])[:, 0].mean().item()
    for (counted, drawn, ended, logged), expected in zip(results, (4, 3), strict=True):
        assert counted == len(ended) == len(drawn) == expected
        assert logged == pytest.approx(mean, rel=1e-5)


# ---- evaluation -----------------------------------------------------------------------------------------------------


class Judge(TrainModule):
    """Logs exact figures in every form, and notes the samples that its hooks see."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import CatMetric, MeanMetric

        self.net = network()
        self.average, self.all = MeanMetric(), CatMetric()
        self.seen: list[float] = []
        self.figures: dict[str, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

    def judge(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        values = self.net(batch.pop("x"))
        self.average.update(values)
        self.all.update(values)
        self.log("mean", values.mean())
        self.log("sum", values.double().sum(), reduce_fx="sum")
        self.log("most", values.max(), reduce_fx="max")
        self.log("average", self.average, add_dataloader_idx=False)

    validation_step = test_step = judge

    def forward(self, batch: Any) -> Tensor:
        output: Tensor = self.net(batch["x"])
        return output

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen += batch["x"][:, 0].tolist()

    def on_validation_epoch_end(self) -> None:
        self.average.reset()

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def judged_loaders(kind: str, count: int) -> Any:
    whole: DataLoader[Any] = DataLoader(pairs(count), batch_size=2)  # type: ignore[arg-type]
    stream = DataLoader(Items(count), batch_size=2)
    return {"map": whole, "stream": stream, "several": [whole, DataLoader(Items(3), batch_size=2), stream]}[kind]


def judged(name: str, stage: str, kind: str, count: int, settings: dict[str, Any]) -> Any:
    module = Judge()
    ranks = dist.get_world_size() if name != "single" else 1
    trainer = silent_trainer(devices=ranks, strategy=strategy(name), max_epochs=1, **settings)
    loaders = judged_loaders(kind, count)
    if stage == "fit":
        trainer.fit(module, DataLoader(pairs(24), batch_size=12 // ranks), loaders)  # type: ignore[arg-type]
        return {key: value.item() for key, value in trainer.callback_metrics.items()}, module.seen
    if stage == "predict":
        return trainer.predict(module, loaders), module.seen
    return getattr(trainer, stage)(module, loaders, verbose=False), module.seen


@pytest.mark.parametrize(
    ("stage", "kind", "count", "settings"),
    [
        ("validate", "map", 1, {}),
        ("validate", "stream", 1, {}),
        ("validate", "several", 5, {}),
        ("test", "stream", 5, {"limit_test_batches": 2}),
        ("predict", "several", 1, {}),
        ("predict", "map", 5, {}),
        ("fit", "several", 12, {"num_sanity_val_steps": 2, "val_check_interval": 1}),
    ],
)
def test_an_evaluation_sees_every_sample_once(stage: str, kind: str, count: int, settings: dict[str, Any]) -> None:
    expected, seen = judged("single", stage, kind, count, settings)
    results = run_on_ranks(3, judged, "fsdp", stage, kind, count, settings, timeout=30)
    for found, _ in results:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert sorted(x for _, own in results for x in own) == sorted(seen)


# ---- ranks that see the same data -----------------------------------------------------------------------------------


class InPairs(DDPStrategy):
    """Two ranks at a time compute one part of the data together, as ranks of a tensor-parallel group do."""

    name = "pairs"
    degrees = Degrees(tp=2)


@pytest.mark.parametrize(
    ("stage", "kind", "count"),
    [("validate", "several", 5), ("test", "map", 1), ("predict", "several", 5), ("fit", "several", 12)],
)
def test_what_two_ranks_see_counts_once(stage: str, kind: str, count: int) -> None:
    expected, seen = judged("single", stage, kind, count, {})
    results = run_on_ranks(2, judged, "pairs", stage, kind, count, {}, timeout=30)
    for found, own in results:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert own == seen


class Drawing(Fickle):
    """Logs what it draws, and sums of its data."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.net(batch["x"]), batch["y"])
        self.log("drawn", torch.rand(()), on_epoch=True)
        self.log("sum", batch["x"].double().sum(), on_epoch=True, reduce_fx="sum")
        return loss


class SavesTwo(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def drawing(name: str, path: str, resumes: bool = False) -> tuple[dict[str, float], Tensor]:
    module = Drawing("never", "before")
    ranks = 1 if name == "single" else dist.get_world_size()
    callbacks = [] if resumes or name == "single" else [SavesTwo(path)]
    trainer = silent_trainer(devices=ranks, strategy=strategy(name), max_epochs=1, callbacks=callbacks)
    # What a run that is resumed was seeded with does not count.
    torch.manual_seed(4 if resumes else 3)
    data: DataLoader[Any] = DataLoader(pairs(9), batch_size=2)  # type: ignore[arg-type]
    trainer.fit(module, data, ckpt_path=path if resumes else None)
    figures = {key: value.item() for key, value in trainer.callback_metrics.items()}
    return figures, weights_of(module)


def test_training_in_pairs_is_that_of_one_process(tmp_path: Path) -> None:
    path = str(tmp_path / "two.ckpt")
    with torch.random.fork_rng():
        figures, weights = drawing("single", path)
    for resumes in (False, True):
        for found, own in run_on_ranks(2, drawing, "pairs", path, resumes):
            assert found == pytest.approx(figures, rel=1e-6)
            torch.testing.assert_close(own, weights)


# ---- what cannot be made to fit -------------------------------------------------------------------------------------


class Halfway(Fickle):
    """Gives up between the two layers of its model, on one rank."""

    def __init__(self, index: int) -> None:
        super().__init__("never", "before")
        self.index = index

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[1](self.net[0](batch["x"]))
        if batch_idx == self.index and self.global_rank == 1:
            return None
        return nn.functional.mse_loss(self.net[3](hidden), batch["y"])


def halfway(index: int) -> str:
    module = Halfway(index)
    trainer = silent_trainer(devices=2, strategy="fsdp", max_epochs=1)
    trainer.fit(module, DataLoader(pairs(24), batch_size=2))  # type: ignore[arg-type]
    return "trained"


def test_a_step_that_gives_up_halfway_is_an_error() -> None:
    with pytest.raises(AssertionError, match="LoopError"):
        run_on_ranks(2, halfway, 3, timeout=20)


def test_so_it_is_where_no_step_had_a_loss_before() -> None:
    module = Halfway(0)
    watch = CallWatch(module)
    for layers, complete in (([0], False), ([0, 1, 3], True)):
        watch.open()
        values = pairs(1)[0]["x"]
        for layer in layers:
            values = module.net[layer](values)
        calls = watch.close()
        if complete:
            watch.idle_loss(calls).backward()
        else:
            with refuses(LoopError, "training_step"):
                watch.idle_loss(calls)
    watch.remove()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


class NeverHere(Fickle):
    def silent(self, index: int) -> bool:
        return self.global_rank == 1


def never_here() -> None:
    trainer = silent_trainer(devices=2, strategy="fsdp", max_epochs=1)
    trainer.fit(NeverHere("", "before"), DataLoader(pairs(24), batch_size=2))  # type: ignore[arg-type]


def test_a_rank_that_never_has_a_loss_and_never_runs_its_model_is_an_error() -> None:
    with pytest.raises(AssertionError, match="LoopError"):
        run_on_ranks(2, never_here, timeout=20)
