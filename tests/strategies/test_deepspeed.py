"""The DeepSpeed strategies train what plain torch trains, and leave the module as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from mixture import GLOBAL_BATCH, PLACES, Mixture, MixtureModule, loss_of, mixture, optimizer_of, rows_of, scheduler_of
from models import silent_trainer, step_means
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import AccumulationSchedule, Trainer, TrainModule
from phalanx.framework.checkpoint.reader import open_checkpoint
from phalanx.strategies import DeepSpeedStrategy

CLIP = 0.3
# The micro-batches of each step.
WINDOWS = (1, 2, 3, 1)


class Module(MixtureModule):
    """Notes norms too, and has a schedule."""

    def __init__(self, kind: str = "adamw") -> None:
        super().__init__()
        self.kind = kind
        self.norms: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.net, batch[0]), on_epoch=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).argmax(-1)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if gradient_clip_val is not None:
            norm = self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            assert norm is not None
            self.norms.append(float(norm))

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self.net, self.kind)
        return [optimizer], [{"scheduler": scheduler_of(optimizer), "interval": "step"}]


def by_hand(
    net: nn.Module, rows: Tensor, kind: str = "adamw", windows: Sequence[int] = WINDOWS
) -> tuple[list[float], list[float]]:
    """Train a step for each window in one process; return losses and norms."""
    optimizer = optimizer_of(net, kind)
    scheduler = scheduler_of(optimizer)
    losses, norms, position = [], [], 0
    for window in windows:
        optimizer.zero_grad()
        total = 0.0
        for _ in range(window):
            loss = loss_of(net, rows[position : position + GLOBAL_BATCH])
            (loss / window).backward()
            total += loss.item() / window
            position += GLOBAL_BATCH
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), CLIP)))
        optimizer.step()
        scheduler.step()
        losses.append(total)
    return losses, norms


def trainer_of(ranks: int, strategy: Any, **arguments: Any) -> Trainer:
    settings: dict[str, Any] = {
        "devices": ranks,
        "max_steps": len(WINDOWS),
        "accumulate_grad_batches": AccumulationSchedule.cycle(WINDOWS),
        "gradient_clip_val": CLIP,
    }
    return silent_trainer(strategy=strategy, **{**settings, **arguments})


def loader_of(ranks: int, uses_all: bool = True, count: int = 20 * GLOBAL_BATCH) -> DataLoader[Any]:
    return DataLoader(TensorDataset(rows_of(count, uses_all)), batch_size=GLOBAL_BATCH // ranks)


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Return weights and buffers, none of which may be on the meta device."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def attributes(module: nn.Module) -> list[Any]:
    """Return what a module and its parameters are and carry, as far as others could add to it."""
    found: list[Any] = []
    for part in module.modules():
        hooks = len(part._forward_pre_hooks), len(part._forward_hooks)
        found.append((type(part), sorted(part.__dict__), type(part._parameters), hooks))
    for name, one in module.named_parameters():
        kind = nn.Parameter if one.is_meta else type(one)
        described = tuple(one.shape), one.dtype, one.requires_grad, one.grad is None
        found.append((name, kind, sorted(one.__dict__), described))
    return found


def trained(place: dict[str, Any], kind: str, uses_all: bool) -> Any:
    module = Module(kind)
    before = attributes(module.net)
    trainer_of(2, DeepSpeedStrategy(**place)).fit(module, loader_of(2, uses_all))
    assert attributes(module.net) == before
    assert module.net.head.weight is module.net.embed.weight
    weights = None if module.net.never.is_meta else whole(module.net)
    return module.losses, module.norms, weights


def compare(place: dict[str, Any], kind: str = "adamw", uses_all: bool = True) -> None:
    results = run_on_ranks(2, trained, place, kind, uses_all)
    net = mixture()
    losses, norms = by_hand(net, rows_of(20 * GLOBAL_BATCH, uses_all), kind)
    assert step_means([result[0] for result in results], WINDOWS).tolist() == pytest.approx(losses, rel=1e-5)
    for _, found, _ in results:
        assert found == pytest.approx(norms, rel=1e-5)
    held = [weights for _, _, weights in results if weights is not None]
    assert len(held) == (1 if place["stage"] == 3 else 2)
    for weights in held:
        torch.testing.assert_close(weights, whole(net), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", PLACES)
def test_losses_norms_and_weights_equal_plain_torch(place: str) -> None:
    # Some micro-batches and windows leave parameters unused.
    compare(PLACES[place], uses_all=False)


@pytest.mark.parametrize(
    ("place", "kind"),
    [("zero3", "sgd"), ("zero2-offload", "sgd"), ("zero2-offload", "adam"), ("zero2-offload", "amsgrad")],
)
def test_other_optimizers(place: str, kind: str) -> None:
    compare(PLACES[place], kind)


# ---- one thing after the other -----------------------------------------------------------------------------------


def in_a_row(place: dict[str, Any]) -> tuple[float, float, list[Tensor], list[float]]:
    module = Module()
    trainer = trainer_of(2, DeepSpeedStrategy(**place))
    # As many as the steps take: the epoch ends with them, and with it comes the validation.
    data = loader_of(2, count=sum(WINDOWS) * GLOBAL_BATCH)
    trainer.fit(module, data, loader_of(2, count=18))
    during = float(trainer.callback_metrics["val_loss"])
    (after,) = trainer.validate(module, loader_of(2, count=18), verbose=False)
    predicted = trainer.predict(module, loader_of(2, count=18))
    assert predicted is not None
    first = list(module.losses)
    trainer_of(2, DeepSpeedStrategy(**place)).fit(module, data)
    return during, float(after["val_loss"]), [row for part in predicted for row in part], module.losses[len(first) :]


@pytest.mark.parametrize("place", ["zero2", "zero3-offload"])
def test_fit_validate_predict_and_fit_again(place: str) -> None:
    results = run_on_ranks(2, in_a_row, PLACES[place])
    net, rows = mixture(), rows_of(20 * GLOBAL_BATCH)
    by_hand(net, rows)
    with torch.no_grad():
        expected = loss_of(net, rows[:18]).item()
        tokens = net(rows[:18]).argmax(-1)
    losses, _ = by_hand(net, rows)
    for during, after, _, _ in results:
        assert during == pytest.approx(expected, rel=1e-5)
        assert after == pytest.approx(expected, rel=1e-5)
    predicted = torch.stack(results[0][2])
    assert torch.equal(predicted, tokens) or len(predicted) < len(tokens)
    assert step_means([result[3] for result in results], WINDOWS).tolist() == pytest.approx(losses, rel=1e-5)


def one_after_the_other(names: list[Any]) -> list[float]:
    module = Module()
    for name in names:
        module.losses.clear()
        trainer_of(2, name if isinstance(name, str) else DeepSpeedStrategy(**name)).fit(module, loader_of(2))
    return module.losses


def test_a_fit_under_any_strategy_after_one_under_another() -> None:
    chain = [
        "zero1",
        PLACES["zero3"],
        "ddp_find_unused_parameters_true",
        {"stage": 3, "gather_weights": "all"},
        "zero2",
    ]
    results = run_on_ranks(2, one_after_the_other, chain)
    net = mixture()
    for _ in chain:
        losses, _ = by_hand(net, rows_of(20 * GLOBAL_BATCH))
    assert step_means(results, WINDOWS).tolist() == pytest.approx(losses, rel=1e-4)


# ---- precision, and modules that come in other ways --------------------------------------------------------------


class Still(Module):
    """Trains with a learning rate of 0."""

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self.net)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        return optimizer


def unchanged(place: dict[str, Any], precision: str) -> list[str]:
    module, initial = Still(), whole(mixture())
    trainer = silent_trainer(strategy=DeepSpeedStrategy(**place), devices=2, precision=precision, max_steps=2)
    computed: list[torch.dtype] = []
    module.net.widen.register_forward_hook(lambda part, *_: computed.append(part.weight.dtype))
    trainer.fit(module, loader_of(2))
    assert set(computed) == {torch.bfloat16 if precision == "bf16-mixed" else torch.float32}
    if module.net.never.is_meta:
        return []
    found = whole(module.net)
    return [name for name in initial if not torch.equal(found[name], initial[name])]


@pytest.mark.parametrize("place", ["zero1", "zero3", "zero2-offload", "zero3-offload"])
def test_bf16_loses_nothing_of_the_weights(place: str) -> None:
    for different in run_on_ranks(2, unchanged, PLACES[place], "bf16-mixed"):
        assert different == []


class Built(Module):
    """Builds its network where the strategy has it built."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def configure_model(self) -> None:
        if not self.made:
            torch.manual_seed(11 + self.global_rank)
            self.net = Mixture()
            self.made += 1


def built_inside(place: dict[str, Any], precision: str) -> Any:
    module = Built()
    trainer_of(2, DeepSpeedStrategy(**place), precision=precision).fit(module, loader_of(2))
    return module.losses, None if module.net.never.is_meta else whole(module.net)


@pytest.mark.parametrize(
    ("place", "precision"), [("zero2", "32-true"), ("zero3-offload", "32-true"), ("zero3", "bf16-mixed")]
)
def test_a_model_is_built_from_rank_zero_weights_where_it_is_split(place: str, precision: str) -> None:
    results = run_on_ranks(2, built_inside, PLACES[place], precision)
    torch.manual_seed(11)
    net = Mixture()
    net.frozen.requires_grad_(False)
    losses, _ = by_hand(net, rows_of(20 * GLOBAL_BATCH))
    exact = precision == "32-true"
    means = step_means([result[0] for result in results], WINDOWS).tolist()
    assert means == pytest.approx(losses, rel=1e-5 if exact else 3e-2)
    if exact:
        torch.testing.assert_close(results[0][1], whole(net), rtol=1e-4, atol=1e-5)


class Jumping(Module):
    """Has a loss that is not finite in one of its updates."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 2 and self.global_rank == 1 else loss


def skips(place: dict[str, Any]) -> tuple[int, Any]:
    module = Jumping()
    trainer = trainer_of(2, DeepSpeedStrategy(**place), nonfinite="skip", max_epochs=1, max_steps=-1,
                         accumulate_grad_batches=1)  # fmt: skip
    trainer.fit(module, loader_of(2, count=4 * GLOBAL_BATCH))
    return trainer.global_step, None if module.net.never.is_meta else whole(module.net)


@pytest.mark.parametrize("place", ["zero2", "zero3", "zero2-offload"])
def test_an_update_that_is_not_finite_is_left_out(place: str) -> None:
    rows = rows_of(20 * GLOBAL_BATCH)
    net = mixture()
    by_hand(net, torch.cat([rows[: 2 * GLOBAL_BATCH], rows[3 * GLOBAL_BATCH :]]), windows=(1, 1, 1))
    results = run_on_ranks(2, skips, PLACES[place])
    assert [steps for steps, _ in results] == [3, 3]
    torch.testing.assert_close(results[0][1], whole(net), rtol=1e-4, atol=1e-5)


def reductions(place: dict[str, Any], window: int) -> int:
    """Return how many reductions one update takes."""
    strategy = DeepSpeedStrategy(**place)
    counted: list[str] = []

    class Counting(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == window:
                counted.append("begin")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 * window - 1:
                counted.append("end")

    names = ("all_reduce", "reduce_scatter_tensor", "reduce", "all_reduce_coalesced", "reduce_scatter_single")
    with contextlib.ExitStack() as stack:
        for name in names:
            real = getattr(torch.distributed, name, None)
            if real is not None:

                def count(*args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> Any:
                    counted.append(_name)
                    return _real(*args, **kwargs)

                stack.enter_context(mock.patch.object(torch.distributed, name, count))
        trainer_of(2, strategy, accumulate_grad_batches=window, max_steps=2).fit(Counting(), loader_of(2))
    return counted.index("end") - counted.index("begin") - 1


def test_stage_1_reduces_once_a_window() -> None:
    ones = run_on_ranks(2, reductions, PLACES["zero1"], 1)
    fours = run_on_ranks(2, reductions, PLACES["zero1"], 4)
    assert ones == fours
    assert ones[0] > 0


class Normalised(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = (self.net(batch[0].float()).float() - 1.0).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self.net(batch[0].float()).float() - 1.0).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def normalised(strategy: str, shared: bool) -> Any:
    torch.manual_seed(0)
    module = Normalised()
    trainer = trainer_of(2, strategy, precision="bf16-mixed", sync_batchnorm=shared, val_check_interval=2, max_steps=4)
    trainer.fit(module, loader_of(2), loader_of(2, count=12))
    layer: Any = module.net[1]
    assert type(layer) is nn.BatchNorm1d
    return module.losses, trainer.callback_metrics["val_loss"].item(), layer.running_mean


@pytest.mark.parametrize(("strategy", "shared"), [("zero2", True), ("zero3", False)])
def test_running_statistics_stay_exact_beside_low_weights(strategy: str, shared: bool) -> None:
    (losses, evaluated, running), _ = run_on_ranks(2, normalised, strategy, shared)
    (expected, expected_evaluated, expected_running), _ = run_on_ranks(2, normalised, "ddp", shared)
    assert running.dtype == torch.float32
    assert losses == pytest.approx(expected, rel=2e-2)
    assert evaluated == pytest.approx(expected_evaluated, rel=2e-2)
    torch.testing.assert_close(running, expected_running, rtol=2e-2, atol=2e-2)


class Saved(Normalised):
    """Saves after the third update; notes rank 0's buffers then."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.buffers_then: dict[str, Tensor] = {}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 3:
            self.buffers_then = {name: buffer.clone() for name, buffer in self.named_buffers()}
            self.trainer.save_checkpoint(self.path)


def saved_buffers(strategy: str, path: str) -> Any:
    torch.manual_seed(0)
    module = Saved(path)
    trainer_of(2, strategy, accumulate_grad_batches=1, max_steps=3).fit(module, loader_of(2))
    stored = open_checkpoint(path)
    return module.buffers_then, {name: stored.read("model", name) for name in module.buffers_then}


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_a_checkpoint_holds_the_buffers_of_one_rank(strategy: str, tmp_path: Path) -> None:
    (own, stored), (others, _) = run_on_ranks(2, saved_buffers, strategy, str(tmp_path / "saved"))
    assert not torch.equal(own["net.1.running_mean"], others["net.1.running_mean"])
    torch.testing.assert_close(stored, own, rtol=0.0, atol=0.0)
