"""torchmetrics logged as objects: exact over ranks, in the epoch's one exchange, reset with it, saved with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from logged import KINDS, Interrupt, counted_collectives, numbers
from messages import refuses
from models import SILENT, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import (
    Accuracy,
    CatMetric,
    ClasswiseWrapper,
    ConfusionMatrix,
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    MetricTracker,
    MinMaxMetric,
    PearsonCorrCoef,
    Precision,
    Recall,
    SpearmanCorrCoef,
)
from torchmetrics.classification import BinaryAUROC

from phalanx import TrainModule
from phalanx.framework.core.errors import MetricError
from phalanx.framework.metrics.torchmetrics_state import (
    compute_over_ranks,
    load_metric_states,
    metric_states,
    packed_states,
)

CLASSES = 3


def data(count: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, 4, generator=generator), torch.randint(0, CLASSES, (count,), generator=generator)
    )


def batches(count: int, batch_size: int = 2, seed: int = 0) -> DataLoader[Any]:
    return DataLoader(data(count, seed), batch_size=batch_size)


class Classifier(TrainModule):
    """Logs metrics of several kinds in validation, one in training."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = nn.Linear(4, CLASSES)
        arguments: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES}
        self.train_accuracy = Accuracy(**arguments)
        self.accuracy = Accuracy(**arguments, average="micro")
        self.error = MeanSquaredError()
        self.auroc = BinaryAUROC()
        self.correlation = PearsonCorrCoef()
        self.ranking = SpearmanCorrCoef()
        self.both = MetricCollection([Precision(**arguments), Recall(**arguments)], prefix="val_")
        self.twice = MeanMetric()
        self.composed = self.twice * 2 + 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        self.train_accuracy(logits, y)
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        return nn.functional.cross_entropy(logits, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x)
        score, first = logits.softmax(1)[:, 0], (y == 0).long()
        self.accuracy(logits, y)
        self.error(score, first.float())
        self.auroc.update(score, first)
        self.correlation.update(score, x[:, 0])
        self.ranking.update(score, x[:, 0])
        self.both.update(logits, y)
        self.twice.update(score)
        self.log("accuracy", self.accuracy)
        for name in ("error", "auroc", "correlation", "ranking", "composed"):
            self.log(name, getattr(self, name))
        self.log_dict(self.both)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def validated(ranks: int, count: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics, and those of a second validation with other data of the same module."""
    module = Classifier()
    trainer = silent_trainer(devices=ranks)
    first = trainer.validate(module, batches(count), verbose=False)[0]
    assert first == numbers(trainer.callback_metrics)
    return first, trainer.validate(module, batches(count, seed=1), verbose=False)[0]


@pytest.mark.parametrize(("ranks", "count"), [(2, 22), (3, 5)])
def test_metrics_over_ranks_are_those_of_one_process(ranks: int, count: int) -> None:
    expected = validated(1, count)
    assert {"accuracy", "error", "auroc", "correlation", "composed", "val_MulticlassRecall"} <= set(expected[0])
    assert expected[0] != expected[1]
    results = run_on_ranks(ranks, validated, ranks, count)
    for found in results:
        assert found == results[0]
        for mine, one_process in zip(found, expected, strict=True):
            for name in ("accuracy", "auroc", "ranking", "val_MulticlassRecall", "val_MulticlassPrecision"):
                assert mine[name] == one_process[name], name
            # Float states are added up in another order.
            assert mine == pytest.approx(one_process, rel=1e-5, abs=1e-6)


class OnlyAccuracy(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.accuracy(self.net(x), y)
        self.log("accuracy", self.accuracy)
        self.log("loss", 1.0)


def only_accuracy(ranks: int, count: int) -> dict[str, float]:
    trainer = silent_trainer(devices=ranks)
    trainer.validate(OnlyAccuracy(), batches(count), verbose=False)
    return numbers(trainer.callback_metrics)


def test_ranks_without_data_have_the_metrics_too() -> None:
    expected = only_accuracy(1, 2)
    assert set(expected) == {"accuracy", "loss"}
    assert run_on_ranks(3, only_accuracy, 3, 2) == [expected] * 3


def collectives(ranks: int) -> list[str]:
    module = Classifier()
    trainer = silent_trainer(devices=ranks)
    trainer.validate(module, batches(24), verbose=False)
    with counted_collectives() as with_metrics:
        trainer.validate(module, batches(24), verbose=False)
    with counted_collectives() as without:
        trainer.validate(NoMetrics(), batches(24), verbose=False)
    for name in without:
        with_metrics.remove(name)
    return with_metrics


class NoMetrics(Classifier):
    """Logs nothing; takes part in the exchange of nothing."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def test_metrics_travel_in_the_one_exchange() -> None:
    assert run_on_ranks(2, collectives, 2) == [[], []]


def trained(ranks: int) -> tuple[list[dict[str, float]], int]:
    module, seen = Classifier(), []
    trainer = silent_trainer(devices=ranks, max_epochs=1, num_sanity_val_steps=0)
    for _ in range(2):
        trainer.fit(module, batches(24, 4 // ranks))
        seen.append(numbers(trainer.callback_metrics))
    return seen, int(module.train_accuracy.update_count)


def test_a_training_metric_has_step_and_epoch_values_and_is_reset() -> None:
    (expected, updates) = trained(1)
    assert updates == 0
    assert set(expected[0]) == {"train_accuracy", "train_accuracy_step", "train_accuracy_epoch"}
    assert expected[0]["train_accuracy"] == expected[0]["train_accuracy_epoch"]
    for found, _ in run_on_ranks(2, trained, 2):
        assert [one["train_accuracy"] for one in found] == [one["train_accuracy"] for one in expected]


def test_values_are_lightnings(lightning: Any) -> None:
    body = {name: member for name, member in vars(Classifier).items() if not name.startswith("__")}
    twin = type("Twin", (lightning.LightningModule,), body)()
    for name, part in Classifier().named_children():
        setattr(twin, name, part)
    other = lightning.Trainer(max_epochs=2, **SILENT)
    other.fit(twin, batches(24), batches(22))
    trainer = silent_trainer(max_epochs=2)
    trainer.fit(Classifier(), batches(24), batches(22))
    for kind in KINDS:
        assert numbers(getattr(trainer, kind)) == pytest.approx(numbers(getattr(other, kind)), rel=1e-6)


# ---- one metric ---------------------------------------------------------------------------------------------------


def shared_out(make: Callable[[], Metric], updates: list[tuple[Tensor, ...]], ranks: int) -> Tensor:
    """Compute over ranks that saw every ``ranks``-th update each."""
    metrics = [make() for _ in range(ranks)]
    for index, update in enumerate(updates):
        metrics[index % ranks].update(*update)
    states = [packed_states(metric) for metric in metrics]
    before = [str(metric.metric_state) for metric in metrics]
    values = [compute_over_ranks("x", metric, states) for metric in metrics]
    assert [str(metric.metric_state) for metric in metrics] == before
    assert all(value.isnan() if values[0].isnan() else value == values[0] for value in values)
    return values[0]


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("make", [CatMetric, MaxMetric, SpearmanCorrCoef, BinaryAUROC], ids=lambda m: m.__name__)
def test_a_metric_shared_out_is_the_whole_one(make: Any, ranks: int) -> None:
    generator = torch.Generator().manual_seed(4)
    updates: list[tuple[Tensor, ...]] = []
    for index in range(7):
        # Batches of many lengths.
        scores = torch.rand(index + 1, generator=generator)
        target = torch.rand(index + 1, generator=generator)
        if make is BinaryAUROC:
            target = (target > 0.5).long()
        updates.append((scores,) if make in (CatMetric, MaxMetric) else (scores, target))

    def scalar() -> Metric:
        # The order in a list shows in its last item.
        return Last() if make is CatMetric else make()

    whole = scalar()
    for update in updates:
        whole.update(*update)
    assert shared_out(scalar, updates, ranks) == whole.compute()


class Last(CatMetric):
    """The last item of a list in dataset order."""

    def compute(self) -> Tensor:
        return super().compute()[-1]


class Kinds(Metric):
    """States of dtypes and shapes that seldom travel."""

    small: Tensor
    flags: Tensor
    pieces: list[Tensor]
    scalars: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("small", torch.zeros(2, dtype=torch.bfloat16), dist_reduce_fx="sum")
        self.add_state("flags", torch.zeros(1, dtype=torch.bool), dist_reduce_fx="max")
        self.add_state("empty", torch.zeros(0), dist_reduce_fx="sum")
        self.add_state("pieces", [], dist_reduce_fx=None)
        self.add_state("scalars", [], dist_reduce_fx="cat")

    def update(self, x: Tensor) -> None:
        self.small = self.small + 1
        self.flags = self.flags | True
        self.pieces.append(x)
        self.pieces.append(x[None].double())
        self.scalars.append(x.sum())

    def compute(self) -> Tensor:
        total = torch.cat([piece.flatten() for piece in self.pieces]).sum()
        return self.small.sum() + total + torch.stack(list(self.scalars)).sum() + self.flags.float().sum()


@pytest.mark.parametrize("ranks", [1, 3])
def test_states_of_any_dtype_and_shape_travel(ranks: int) -> None:
    updates: list[tuple[Tensor, ...]] = [(torch.full((index,), 1.0),) for index in range(1, 5)]
    whole = Kinds()
    for update in updates:
        whole.update(*update)
    assert shared_out(Kinds, updates, ranks) == whole.compute() == 2 * 4 + 2 * 10 + 10 + 1


def test_a_value_that_the_user_computed_before_is_not_taken_for_that_of_all() -> None:
    metrics = [MeanMetric(), MeanMetric()]
    for value, metric in enumerate(metrics):
        metric.update(float(value))
        metric.compute()
    states = [packed_states(metric) for metric in metrics]
    assert [compute_over_ranks("x", metric, states) for metric in metrics] == [0.5, 0.5]
    assert [metric.compute() for metric in metrics] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (ConfusionMatrix(task="multiclass", num_classes=2), "(2, 2)"),
        (ClasswiseWrapper(Accuracy(task="multiclass", num_classes=2, average=None)), "dict"),
        (MinMaxMetric(Accuracy(task="multiclass", num_classes=2)), "dict"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_metric_without_a_single_value_is_refused(metric: Any, name: str) -> None:
    metric.update(torch.tensor([0, 1]), torch.tensor([0, 1]))
    with refuses(MetricError, name):
        compute_over_ranks("x", metric)


class Failing(MeanMetric):
    def compute(self) -> Tensor:
        raise ValueError("cannot")


class FailingModule(OnlyAccuracy):
    def __init__(self) -> None:
        super().__init__()
        self.failing = Failing()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.failing.update(1.0)
        self.log("bad", self.failing)


class Direct(OnlyAccuracy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("both", self.both)


def failure(kind: type[Classifier], count: int) -> str:
    try:
        silent_trainer(devices=3).validate(kind(), batches(count), verbose=False)
    except MetricError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("count", [1, 12])
def test_a_metric_that_fails_is_an_error_on_every_rank(count: int) -> None:
    assert run_on_ranks(3, failure, FailingModule, count) == ["Failing, logged as 'bad', failed: cannot"] * 3


def test_a_collection_in_log_is_pointed_to_log_dict() -> None:
    with refuses(MetricError, "'both'", "MetricCollection", "log_dict"):
        silent_trainer().validate(Direct(), batches(2), verbose=False)


# ---- an epoch interrupted -----------------------------------------------------------------------------------------


class ByHand(Classifier):
    """Logs one metric as an object, and computes others itself at the epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        arguments: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES}
        self.mine = MetricCollection([Precision(**arguments), Recall(**arguments)])
        self.scores = SpearmanCorrCoef()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        self.mine.update(logits, y)
        self.scores.update(logits[:, 0], x[:, 0])
        self.log("scores", self.scores, on_epoch=True, on_step=False)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("updates", float(self.mine["MulticlassRecall"].update_count), reduce_fx="sum")
        self.log_dict(self.mine.compute())
        self.mine.reset()


def interrupted(directory: Path) -> list[dict[str, float]]:
    path = directory / "middle.ckpt"
    found = []
    for resumes in (False, True):
        callbacks = [] if resumes else [Interrupt(path, 2)]
        trainer = silent_trainer(devices=2, max_epochs=2, callbacks=callbacks)
        trainer.fit(ByHand(), batches(24, 2), ckpt_path=path if resumes else None)
        found.append(numbers(trainer.callback_metrics))
    return found


def test_metrics_survive_a_checkpoint_in_mid_epoch(tmp_path: Path) -> None:
    for whole, resumed in run_on_ranks(2, interrupted, tmp_path):
        assert {"scores", "MulticlassRecall", "train_accuracy_epoch", "updates"} <= set(whole)
        assert whole["updates"] == 12
        assert resumed == whole


def test_states_go_to_a_checkpoint_and_back() -> None:
    module, other = ByHand(), ByHand()
    other.accuracy.update(torch.tensor([0]), torch.tensor([0]))
    for x, y in batches(6):
        module.mine.update(module.net(x), y)
        module.scores.update(x[:, 0], x[:, 1])
    state = metric_states(module)
    assert "accuracy" not in state
    load_metric_states(other, state)
    assert other.accuracy.update_count == 0
    assert other.mine.compute() == module.mine.compute()
    assert other.scores.compute() == module.scores.compute()


def test_what_wrappers_keep_outside_of_states_is_restored() -> None:
    def module() -> nn.Module:
        tracker = MetricTracker(MeanMetric(), maximize=False)
        return nn.ModuleDict({"extremes": MinMaxMetric(MeanMetric()), "tracker": tracker})

    before: Any = module()
    for value in (3.0, 1.0, 2.0):
        before["extremes"](torch.tensor(value))
        before["tracker"].increment()
        before["tracker"].update(torch.tensor(value))
    after: Any = module()
    load_metric_states(after, metric_states(before))
    assert after["extremes"].compute() == before["extremes"].compute() == {"raw": 2.0, "max": 3.0, "min": 1.0}
    assert after["tracker"].compute_all().tolist() == [3.0, 1.0, 2.0]
    after["tracker"].update(torch.tensor(4.0))
    assert after["tracker"].compute() == 3.0
