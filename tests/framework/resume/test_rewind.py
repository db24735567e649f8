"""``nonfinite="rewind"``: a run goes back to a checkpoint and leaves out the data since, as in a loop by hand."""

from __future__ import annotations

import copy
import csv
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SILENT, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from phalanx import Trainer, TrainModule
from phalanx.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from phalanx.framework.core.errors import ConfigurationError, NonFiniteError
from phalanx.framework.resume import rewind

SAMPLES, EPOCHS, EVERY = 44, 2, 2
Fails = Callable[[list[int], int], bool]


def one_sample(samples: list[int], step: int) -> bool:
    return 29 in samples


def later_samples(samples: list[int], step: int) -> bool:
    """Fails from a sample on: after the first return, the first step fails again."""
    return any(26 <= each < 30 for each in samples)


def always(samples: list[int], step: int) -> bool:
    return step >= 7


FAILURES: dict[str, Fails] = {each.__name__: each for each in (one_sample, later_samples, always)}


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_of(network: nn.Module, x: Tensor, step: int, failure: str) -> Tensor:
    loss: Tensor = (network(x / SAMPLES) - torch.sin(x / 5)).square().mean()
    failed: Tensor = loss * math.nan
    return failed if FAILURES[failure](x[:, 0].long().tolist(), step) else loss


class Failing(TrainModule):
    def __init__(self, failure: str, manual: bool = False) -> None:
        super().__init__()
        self.net, self.failure = net(), failure
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.trainer is not None
        loss = loss_of(self.net, batch[0], self.trainer.global_step, self.failure)
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Samples(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.tensor([float(each)]),) for each in range(SAMPLES)])


def by_hand(failure: str, window: int, most: int = 100) -> tuple[dict[str, Tensor] | None, list[float], list[int]]:
    """Train in plain torch on one process.

    Returns:
        The weights, the loss of each step, and the steps that were gone back to; None without weights if it ended.
    """
    network = net()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    windows = [(epoch, first) for epoch in range(EPOCHS) for first in range(0, SAMPLES, window)]
    left_out: set[int] = set()
    saved: list[tuple[int, int, Any]] = []
    losses: list[float] = []
    returns: list[int] = []
    at = 0
    while at < len(windows):
        if at in left_out:
            at += 1
            continue
        first = windows[at][1]
        x = torch.arange(first, min(first + window, SAMPLES), dtype=torch.float32)[:, None]
        loss = loss_of(network, x, len(losses), failure)
        if not loss.isfinite():
            kept = [each for each in saved if set(range(each[1], at)) - left_out]
            if not kept or len(returns) == 10:
                return None, losses, returns
            step, begin, states = kept[-1]
            saved = kept
            left_out |= set(sorted(set(range(begin, at + 1)) - left_out)[-most:])
            network.load_state_dict(states[0])
            optimizer.load_state_dict(copy.deepcopy(states[1]))
            losses, at = losses[:step], begin
            returns.append(step)
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        at += 1
        if len(losses) % EVERY == 0 and [step for step, _, _ in saved[-1:]] != [len(losses)]:
            states = copy.deepcopy(network.state_dict()), copy.deepcopy(optimizer.state_dict())
            saved.append((len(losses), at, states))
    return network.state_dict(), losses, returns


def trained(root: str, failure: str, data: str = "map", most: int = 100, **arguments: Any) -> Any:
    """Return the weights, the logged losses, and the rewinds; the message of the error instead if there is one."""
    module = Failing(failure, arguments.pop("manual", False))
    saves = ModelCheckpoint(every_n_train_steps=EVERY, save_top_k=-1)
    trainer = Trainer(
        **{**SILENT, "logger": "csv", "enable_checkpointing": True, "callbacks": [saves], "max_epochs": EPOCHS},
        nonfinite="rewind",
        default_root_dir=root,
        log_every_n_steps=1,
        **arguments,
    )
    given = TensorDataset(torch.arange(float(SAMPLES))[:, None]) if data == "map" else Samples()
    before, rewind.MOST_WINDOWS = rewind.MOST_WINDOWS, most
    try:
        trainer.fit(module, DataLoader(given, 2))
    except NonFiniteError as error:
        return str(error)
    finally:
        rewind.MOST_WINDOWS = before
    weights = {name: value.detach().clone() for name, value in module.net.state_dict().items()}
    assert trainer.run_dir is not None
    with open(Path(trainer.run_dir) / "metrics.csv") as file:
        rows = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
    found = json.loads((Path(trainer.run_dir) / "rewinds.json").read_text())["rewinds"]
    return weights, rows, [each["to_step"] for each in found]


def check(found: Any, expected: Any, exact: bool) -> None:
    rtol, atol = (0.0, 0.0) if exact else (1e-4, 1e-6)
    for name, value in expected[0].items():
        if found[0][name].device.type == "meta":
            continue  # gathered on rank 0 alone
        torch.testing.assert_close(found[0][name], value, rtol=rtol, atol=atol)
    # A rank logs the loss of its micro-batches.
    assert (found[1] if exact else len(found[1])) == (expected[1] if exact else len(expected[1]))
    assert found[2] == expected[2]


@pytest.mark.parametrize(
    ("failure", "arguments"),
    [
        ("later_samples", {}),
        ("one_sample", {"accumulate_grad_batches": 2}),
        ("later_samples", {"global_batch_size": 4}),
        ("one_sample", {"manual": True}),
        ("later_samples", {"data": "stream"}),
    ],
)
def test_a_run_goes_back_as_by_hand(failure: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    window = 4 if {"accumulate_grad_batches", "global_batch_size"} & arguments.keys() else 2
    # Several micro-batches of a window are one batch by hand, and their mean is rounded differently.
    expected = by_hand(failure, window)
    assert expected[0] is not None
    assert len(expected[2]) >= EPOCHS
    check(trained(str(tmp_path), failure, **arguments), expected, exact=window == 2)


def test_at_most_so_many_steps_are_left_out_at_once(tmp_path: Path) -> None:
    expected = by_hand("one_sample", 2, most=2)
    assert expected[1] != by_hand("one_sample", 2)[1]
    check(trained(str(tmp_path), "one_sample", most=2), expected, exact=True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_ranks_go_back_together(strategy: str, tmp_path: Path) -> None:
    expected = by_hand("one_sample", 4)
    for found in run_on_ranks(2, trained_on_ranks, str(tmp_path), strategy):
        check(found, expected, exact=False)


def trained_on_ranks(root: str, strategy: str) -> Any:
    return trained(root, "one_sample", strategy=strategy, devices=2)


class Growing(Failing):
    """Is given another loader in each epoch; notes what it trains on."""

    def __init__(self) -> None:
        super().__init__("one_sample")
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.trainer is not None
        self.seen += [(self.trainer.current_epoch, int(each)) for each in batch[0][:, 0]]
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        first, stop = (0, 24) if self.trainer.current_epoch == 0 else (24, 36)
        return DataLoader(TensorDataset(torch.arange(float(first), stop)[:, None]), 2)


def test_epochs_of_other_lengths(tmp_path: Path) -> None:
    module = Growing()
    trainer = Trainer(
        **{**SILENT, "enable_checkpointing": True, "max_epochs": 2, "logger": "csv"},
        callbacks=[ModelCheckpoint(every_n_train_steps=8, save_top_k=-1)],
        nonfinite="rewind",
        reload_dataloaders_every_n_epochs=1,
        default_root_dir=tmp_path,
    )
    trainer.fit(module)
    # From the checkpoint after 16 samples of the first epoch to the batch of the second that failed.
    assert module.seen == [(0, each) for each in range(24)] + [(1, each) for each in range(24, 36)][:6] + [
        (1, each) for each in range(30, 36)
    ]


def test_a_run_that_fails_again_and_again_ends(tmp_path: Path) -> None:
    weights, _, returns = by_hand("always", 2)
    assert weights is None
    assert len(returns) == 10
    assert "gone back 10 times" in trained(str(tmp_path), "always")


def test_a_run_without_a_checkpoint_ends_with_what_to_do(tmp_path: Path) -> None:
    trainer = Trainer(
        **{**SILENT, "enable_checkpointing": True, "max_epochs": 1}, nonfinite="rewind", default_root_dir=tmp_path
    )
    with pytest.raises(NonFiniteError, match="no checkpoint to go back to"):
        trainer.fit(Failing("one_sample"), DataLoader(TensorDataset(torch.arange(float(SAMPLES))[:, None]), 2))


@pytest.mark.parametrize("only_after_errors", [False, True])
def test_a_run_that_saves_nothing_is_refused(tmp_path: Path, only_after_errors: bool) -> None:
    callbacks = [OnExceptionCheckpoint(tmp_path)] * only_after_errors
    trainer = silent_trainer(nonfinite="rewind", max_epochs=1, callbacks=callbacks)
    with pytest.raises(ConfigurationError, match="this Trainer saves none"):
        trainer.fit(Failing("one_sample"), DataLoader(TensorDataset(torch.arange(float(SAMPLES))[:, None]), 2))
