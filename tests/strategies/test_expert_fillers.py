"""Expert parallelism on ranks without a batch: filler batches do not change what other ranks compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from long_sequences import LENGTH, LongModel, loader, rows
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor
from torch.utils.data import DataLoader

from phalanx.callbacks import LambdaCallback
from phalanx.strategies import FSDPStrategy

RANKS, EXPERTS, BATCH, FULL, WINDOW = 3, 6, 64, 2, 2


def own_batches() -> DataLoader[Any]:
    """Return this rank's data: two batches, and on the last rank one more."""
    rank, data = dist.get_rank(), rows()
    count = FULL * BATCH
    start = rank * count
    return DataLoader(data[start : start + count + (BATCH if rank == RANKS - 1 else 0)], batch_size=BATCH)  # type: ignore[arg-type]


def trained(path: str, resumed: bool) -> dict[str, Tensor]:
    """Train two epochs, save before the last window of the first one or resume there; return the weights."""

    def save(trainer: Any, *_: Any) -> None:
        if not resumed and trainer.global_step == FULL // WINDOW and not Path(path).exists():
            trainer.save_checkpoint(path)

    module = LongModel(experts=EXPERTS)
    trainer = silent_trainer(
        strategy=FSDPStrategy(gather_weights="all", activation_checkpointing=True),
        devices=RANKS,
        parallel={"ep": RANKS},
        max_epochs=2,
        accumulate_grad_batches=WINDOW,
        use_distributed_sampler=False,
        callbacks=[LambdaCallback(on_train_batch_end=save)],
        verbose=False,
    )
    trainer.fit(module, own_batches(), ckpt_path=path if resumed else None)
    assert trainer.global_step == 2 * (FULL // WINDOW + 1)
    return {name: each.detach().clone() for name, each in module.named_parameters()}


def test_a_run_resumed_where_ranks_have_no_batch_is_the_same_bit_by_bit(tmp_path: Path) -> None:
    path = str(tmp_path / "before.ckpt")
    whole = run_on_ranks(RANKS, trained, path, False)
    for one, other in zip(whole, run_on_ranks(RANKS, trained, path, True), strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


class Counts(LongModel):
    """Appends the number of rows that this rank's experts compute to a list, which no attribute holds: fillers leave
    those as they are."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(experts=EXPERTS)
        for block in self.blocks:
            experts: Any = block.get_submodule("mixture.experts")
            experts.forward = counted(experts.forward, rows)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def counted(forward: Any, rows: list[int]) -> Any:
    def run(hidden: Tensor, index: Tensor, weights: Tensor) -> Any:
        rows.append(len(hidden))
        return forward(hidden, index, weights)

    return run


def predicted(strategy: str, ranks: int) -> tuple[int, list[Any]]:
    """Predict the losses of five batches of two sequences; return the rows of this rank's experts and the losses."""
    rows: list[int] = []
    parallel = {"ep": ranks} if ranks > 1 else None
    trainer = silent_trainer(strategy=strategy, devices=ranks, parallel=parallel, verbose=False)
    losses = trainer.predict(Counts(rows), loader(2, 10))
    return sum(rows), losses or []


def test_evaluation_computes_the_tokens_of_each_batch_once() -> None:
    # Of five batches the first rank has three, and the second one two and a filler; two experts for each token.
    (first, losses), (second, _) = run_on_ranks(2, predicted, "fsdp", 2)
    assert first + second == 5 * 2 * LENGTH * 2 * len(Counts([]).blocks)
    _, expected = predicted("single", 1)
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-5, atol=0)
