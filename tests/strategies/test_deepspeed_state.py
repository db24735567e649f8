"""State of the DeepSpeed strategies that others do not have: odd shapes, other orders of gradients, Adam of the CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mixture import GLOBAL_BATCH, MixtureModule, loss_of, mixture, optimizer_of, rows_of
from models import Regressor, loader, plain_steps, silent_trainer
from ranks import run_on_ranks
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from phalanx.callbacks import LambdaCallback
from phalanx.strategies import DeepSpeedStrategy


def by_hand() -> list[float]:
    """Train eight steps in one process; return the losses."""
    net = mixture()
    return plain_steps(optimizer_of(net), partial(loss_of, net), rows_of(8 * GLOBAL_BATCH).split(GLOBAL_BATCH))


def resumed(ranks: int, strategy: Any, steps: int, root: str, resume: str | None, save: str | None) -> list[float]:
    """Train up to a step, from a checkpoint and to one."""
    module = MixtureModule()
    saver = LambdaCallback(on_train_end=lambda trainer, _: trainer.save_checkpoint(save) if save else None)
    trainer = silent_trainer(
        strategy=strategy, devices=ranks, max_steps=steps, callbacks=[saver], default_root_dir=root
    )
    data = DataLoader(TensorDataset(rows_of(20 * GLOBAL_BATCH)), batch_size=GLOBAL_BATCH // ranks)
    trainer.fit(module, data, ckpt_path=resume)
    return module.losses


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_with_odd_shapes_loads_in_one_process_and_back(stage: int, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"round_robin_gradients": True} if stage == 2 else {}
    strategy = DeepSpeedStrategy(stage=stage, **arguments)
    root, first, second = str(tmp_path), str(tmp_path / "first.ckpt"), str(tmp_path / "second.ckpt")
    losses = torch.tensor(run_on_ranks(2, resumed, 2, strategy, 3, root, None, first)).mean(0).tolist()
    losses += resumed(1, "single", 5, root, first, second)
    losses += torch.tensor(run_on_ranks(3, resumed, 3, strategy, 8, root, second, None)).mean(0).tolist()
    assert losses == pytest.approx(by_hand(), rel=1e-5)


def weights_by_step(strategy: str, root: str, resume: int | None, stop: int) -> dict[int, Tensor]:
    """Train to step ``stop``, from the start or from the checkpoint of a step; return the weights after each."""
    found: dict[int, Tensor] = {}

    def keep(trainer: Any, module: Any, *_: Any) -> None:
        found[trainer.global_step] = torch.cat([one.detach().flatten() for one in module.parameters()]).clone()
        if resume is None:
            trainer.save_checkpoint(f"{root}/{trainer.global_step}.ckpt")

    trainer = silent_trainer(
        devices=2, strategy=strategy, max_steps=stop, callbacks=[LambdaCallback(on_train_batch_end=keep)]
    )
    trainer.fit(Regressor(lr=0.01), loader(64, 4), ckpt_path=None if resume is None else f"{root}/{resume}.ckpt")
    return found


def resumed_at_each_step(strategy: str, root: str) -> list[int]:
    """Return the steps from which a resumed run differs in any bit from the uninterrupted one."""
    whole = weights_by_step(strategy, root, None, 8)
    different = []
    for step in range(1, 7):
        found = weights_by_step(strategy, root, step, step + 2)
        if not all(torch.equal(found[number], whole[number]) for number in (step + 1, step + 2)):
            different.append(step)
    return different


def test_a_run_resumed_at_any_step_is_bit_identical(tmp_path: Path) -> None:
    # DeepSpeed's Adam for the processor multiplies the powers of its betas on from step to step.
    assert run_on_ranks(2, resumed_at_each_step, "zero2-offload", str(tmp_path)) == [[], []]
