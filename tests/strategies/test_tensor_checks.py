"""Tensor parallelism: programs read full values, and those that split layers would train otherwise are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_model import HEADS, WIDTH, Block, SGDModel, token_loader, tokens
from messages import says
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torchmetrics import SumMetric

from phalanx.errors import ConfigurationError

ROWS, BATCH = 8, 4
SUMMED = "replicated_with_grad_allreduce"


class Model(SGDModel):
    """Notes values."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.seen: list[float] = []


class NormedHeads(Block):
    """Norms the queries of each head with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.query_norm = nn.LayerNorm(WIDTH // HEADS)
        plain, parts = self.query, self._modules
        parts["query"] = nn.Sequential(plain, nn.Unflatten(-1, (-1, WIDTH // HEADS)), self.query_norm)


class Normed(Model):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.blocks = nn.ModuleList(NormedHeads() for _ in range(2))

    def configure_tensor_parallel(self, mesh: Any) -> dict[str, Any]:
        plan = super().configure_tensor_parallel(mesh)
        plan["blocks.*.query.0"] = plan.pop("blocks.*.query")
        return plan


class Summed(Normed):
    def configure_tensor_parallel(self, mesh: Any) -> dict[str, Any]:
        return super().configure_tensor_parallel(mesh) | {"blocks.*.query_norm": SUMMED}


class ClipsAndReads(Model):
    """Clips gradients by torch's function, reads a split layer's output in a hook, and uses its weight by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = SumMetric()
        self.blocks[0].widen.register_forward_hook(lambda part, args, output: self.note(output.detach().norm()))

    def note(self, value: Tensor) -> None:
        if self.training:
            self.seen.append(value.item())

    def loss(self, tokens: Tensor) -> Tensor:
        loss = super().loss(tokens)
        self.sum.update(loss.detach())
        inner = nn.functional.linear(self.embed(tokens), self.blocks[1].widen.weight)
        return loss + 0.01 * inner.square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.1)))

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.sum.compute()))


def trained(kind: type[Model], strategy: str) -> tuple[list[float], Any]:
    module = kind()
    trainer = silent_trainer(strategy=strategy, parallel="tp=2", devices=2, max_epochs=1, verbose=False)
    trainer.fit(module, token_loader(ROWS, BATCH))
    return module.seen, None if trainer.global_rank else [each.detach() for each in module.parameters()]


def by_hand(kind: type[Model]) -> tuple[list[float], list[Tensor]]:
    module = kind()
    optimizer = module.configure_optimizers()
    for batch in tokens(ROWS).split(BATCH):
        optimizer.zero_grad()
        module.loss(batch).backward()
        if kind is ClipsAndReads:
            module.on_before_optimizer_step(optimizer)
        optimizer.step()
    if kind is ClipsAndReads:
        module.on_train_epoch_end()
    return module.seen, [each.detach() for each in module.parameters()]


@pytest.mark.parametrize(("kind", "strategy"), [(ClipsAndReads, "fsdp"), (ClipsAndReads, "ddp"), (Summed, "fsdp")])
def test_programs_train_and_read_what_one_process_does(kind: type[Model], strategy: str) -> None:
    seen, weights = by_hand(kind)
    (first, found), (second, _) = run_on_ranks(2, trained, kind, strategy)
    assert first == pytest.approx(seen, rel=1e-4)
    assert second == pytest.approx(seen, rel=1e-4)
    for one, other in zip(found, weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class SparseBlock(Block):
    """Leaves the mean of its inner activations."""

    extra: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        inner = self.widen(self.norm_mlp(x))
        self.extra = inner.abs().mean()
        narrowed: Tensor = self.narrow(nn.functional.gelu(inner))
        return x + narrowed


class Sparse(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SparseBlock() for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch[0]) + sum(block.extra for block in self.blocks)


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(WIDTH, 2), nn.Linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + self.up(self.down(x))
        return output


class Wrapped(Model):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.widen = Adapted(block.widen)


class Parametrized(Model):
    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.blocks[0].widen)


def refused(kind: type[Model]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        trained(kind, "fsdp")
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Normed, ("blocks.0.query", SUMMED)),
        (Sparse, ("the loss differs",)),
        (Wrapped, ("blocks.0.widen.base",)),
        (Parametrized, ("blocks.0.widen", "leave the layer out")),
    ],
)
def test_programs_that_split_layers_would_train_otherwise_are_refused(
    kind: type[Model], words: tuple[str, ...]
) -> None:
    says(run_on_ranks(2, refused, kind), *words)
