"""A rank that runs out of memory anywhere in a pass of ``fsdp`` completes it for the others, and the fit continues."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from exhausted import EVERY, FSDP_RECOVERS, Exhausted, strategy_of
from messages import refuses
from models import regression_data, silent_trainer
from ranks import run_on_ranks
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils.data import DataLoader

from phalanx import Callback
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.core.patches import patch
from phalanx.framework.loop.recovering_step import check_strategy
from phalanx.strategies import FSDPStrategy

pytestmark = FSDP_RECOVERS

NEVER = -1
# Of a pass over two layers: each is gathered twice and reduced once.
COLLECTIVES = 6


class Interrupted(Exhausted):
    """Runs out of memory right before a collective of FSDP; ``layer`` is the number of the collective in its pass."""

    count, limit = 0, -1

    def _run_out(self, hidden: Tensor) -> None:
        """Do nothing: memory is short between layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        # Parameters are gathered before a layer is called, and not before this step: the root has none of its own.
        self.count = 0
        self.limit = self.layer if self._is_meant and self.calls >= self.at and len(batch[0]) > self.largest else -1
        if self.rank == EVERY and self.limit >= 0:
            self.limit = (self.limit + 3 * self.global_rank) % COLLECTIVES
        return super().training_step(batch, batch_idx)

    def interrupt(self, patches: ExitStack) -> None:
        """Patch the collectives of this process."""
        for name in ("foreach_all_gather", "foreach_reduce"):
            patch(patches, _fsdp_param_group, name, self._counted(getattr(_fsdp_param_group, name)))

    def _counted(self, real: Any) -> Any:
        def collective(*args: Any, **options: Any) -> Any:
            if self.count == self.limit:
                self.limit = -1
                self.raise_error()
            self.count += 1
            return real(*args, **options)

        return collective


class Freezing(Callback):
    """Freezes a layer in the second epoch, so that its gradients are no longer reduced; notes the losses."""

    monitors = True

    def __init__(self, freezes: bool) -> None:
        self.freezes = freezes
        self.values: list[float] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if self.freezes and trainer.current_epoch == 1:
            module.net[3].requires_grad_(False)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.values.append(float(trainer.callback_metrics["loss_epoch"]))


def fitted(
    module: Exhausted, micro: int | str, freezes: bool = False, strategy: str = "fsdp"
) -> tuple[list[float], int]:
    """Return the losses of two epochs, and the errors of this rank."""
    curve = Freezing(freezes)
    trainer = silent_trainer(
        max_epochs=2,
        devices=4 if strategy == "hsdp" else 2,
        strategy=strategy_of(strategy),
        global_batch_size=16,
        micro_batch_size=micro,
        callbacks=curve,
    )
    trainer.fit(module, DataLoader(regression_data(40), batch_size=4))
    return curve.values, module.raised


def interrupted_everywhere(strategy: str, rank: int, at: int) -> list[tuple[list[float], int]]:
    found = []
    for collective in range(COLLECTIVES):
        with ExitStack() as patches:
            module = Interrupted("collective", rank, 3 if strategy == "fsdp" else 1, at, layer=collective)
            module.interrupt(patches)
            found.append(fitted(module, "auto", strategy=strategy))
    return [*found, fitted(Exhausted("forward", NEVER, 3), 4, strategy=strategy)]


@pytest.mark.parametrize(("strategy", "rank", "at"), [("fsdp", 0, 2), ("fsdp", EVERY, 0), ("hsdp", 2, 2)])
def test_memory_may_be_short_before_any_collective(strategy: str, rank: int, at: int) -> None:
    results = run_on_ranks(2 if strategy == "fsdp" else 4, interrupted_everywhere, strategy, rank, at)

    for number, attempts in enumerate(results):
        *found, (by_hand, _) = attempts
        for losses, raised in found:
            assert losses == pytest.approx(by_hand, rel=1e-6)
            assert (raised > 0) is (rank in (number, EVERY))


def frozen(micro: int | str, rank: int) -> tuple[list[float], int]:
    return fitted(Exhausted("backward", rank, 3, at=3), micro, freezes=True)


def test_passes_may_change_between_epochs() -> None:
    results = run_on_ranks(2, frozen, "auto", 1)

    expected = run_on_ranks(2, frozen, 4, NEVER)
    for (losses, _), (by_hand, _) in zip(results, expected, strict=True):
        assert losses == pytest.approx(by_hand, rel=1e-6)
    assert [raised for _, raised in results] == [0, 2]


def test_groups_with_further_collectives_are_refused() -> None:
    with refuses(ConfigurationError, "micro_batch_size='auto'", "strategy='fsdp'"):
        check_strategy(FSDPStrategy(tensor_parallel=2))


def whole_replicas() -> None:
    with refuses(ConfigurationError, "micro_batch_size='auto'", "'ddp'"):
        trainer = silent_trainer(
            max_epochs=1, devices=2, strategy="hsdp", global_batch_size=16, micro_batch_size="auto"
        )
        trainer.fit(Exhausted("forward", NEVER, 3), DataLoader(regression_data(40), batch_size=4))


def test_replicas_of_one_rank_are_refused() -> None:
    run_on_ranks(2, whole_replicas)


def test_versions_of_tensors_show_a_sharded_update() -> None:
    (before, after), *_ = run_on_ranks(2, versions)

    assert after > before


def versions() -> tuple[int, int]:
    found: list[int] = []

    class Watching(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            found.append(optimizer.param_groups[0]["params"][0]._version)

    trainer = silent_trainer(max_steps=2, devices=2, strategy=strategy_of("fsdp"), callbacks=Watching())
    trainer.fit(Exhausted("forward", NEVER, 3), DataLoader(regression_data(40), batch_size=4))
    assert torch.distributed.is_initialized()
    return found[0], found[1]
