"""Context parallelism: ranks that share sequences train, log and evaluate what one process does."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from long_sequences import LongModel, by_hand, loader
from messages import refuses, says
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx import Fabric, TrainModule
from phalanx.errors import ConfigurationError, DataError
from phalanx.framework.core.degrees import Degrees
from phalanx.framework.core.precision import resolve_precision
from phalanx.framework.distributed.world import World
from phalanx.framework.parallel.sequence_part import SequencePart
from phalanx.strategies import DDPStrategy

STEPS, BATCH = 4, 8


def trained(
    strategy: Any, ranks: int, window: int, parallel: dict[str, int], recomputes: str = ""
) -> tuple[dict[str, float], Any]:
    """Train; ``recomputes``: how activations are computed again in backward."""
    module = LongModel()
    for block in module.blocks if "reentrant" in recomputes else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=recomputes == "reentrant")
    trainer = silent_trainer(
        strategy=strategy,
        devices=ranks,
        parallel=parallel,
        max_steps=STEPS,
        accumulate_grad_batches=window,
        gradient_clip_val=0.3,
        limit_train_batches=STEPS * window,
        num_sanity_val_steps=0,
        memory="blocks" if recomputes == "blocks" else None,
        verbose=False,
    )
    size = BATCH // trainer.fabric.resources.data_size // window
    trainer.fit(module, loader(size), loader(3, 7))
    held = all(parameter.device.type == "cpu" for parameter in module.parameters())
    weights = {name: each.detach() for name, each in module.named_parameters()} if held else {}
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, weights


# test_meshes.py has replicas and accumulation.
MESHES = [
    ("ddp", 2, 1, {"cp": 2}, "reentrant"),
    ("fsdp", 4, 1, {"cp": 2, "dp_shard": 2}, "blocks"),
    ("fsdp", 4, 2, {"cp": 2, "tp": 2}, "not reentrant"),
    ("ddp", 4, 1, {"cp": 2, "tp": 2}, ""),
]


@pytest.mark.parametrize(("strategy", "ranks", "window", "parallel", "recomputes"), MESHES)
def test_weights_and_metrics_are_those_of_one_process(
    strategy: str, ranks: int, window: int, parallel: dict[str, int], recomputes: str
) -> None:
    losses, expected = by_hand(1, 0.3, STEPS, BATCH)
    single, _ = trained("single", 1, 1, {})
    for metrics, weights in run_on_ranks(ranks, trained, strategy, ranks, window, parallel, recomputes):
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected.get_parameter(name).detach(), rtol=1e-4, atol=2e-6)
        assert metrics["val_loss"] == pytest.approx(single["val_loss"], rel=1e-5)
        assert metrics["tokens"] == single["tokens"]
        if window == 1 and parallel["cp"] == ranks:
            assert metrics["train_loss"] == pytest.approx(sum(losses) / STEPS, rel=1e-5)


def exchanges(steps: int) -> int:
    """Return the number of exchanges of objects in a fit of some steps."""
    calls: list[None] = []
    gather = World.all_gather_object

    def counted(world: World, *args: Any) -> Any:
        calls.append(None)
        return gather(world, *args)

    trainer = silent_trainer(strategy="ddp", devices=2, parallel={"cp": 2}, max_steps=steps)
    with mock.patch.object(World, "all_gather_object", counted):
        trainer.fit(LongModel(), loader(BATCH))
    return len(calls)


def test_ranks_that_log_the_same_names_do_not_exchange_them_in_steps() -> None:
    few, many = run_on_ranks(2, exchanges, 1), run_on_ranks(2, exchanges, 6)
    assert few == many


class ByHandAttention(LongModel):
    """Attends without torch's function, so each rank would see its own part only."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = partial(attends_by_hand, block)


def attends_by_hand(block: Any, x: Tensor) -> Tensor:
    normed = block.norm(x)
    scores = block.query(normed) @ block.key(normed).transpose(1, 2)
    mask = torch.full(scores.shape[-2:], float("-inf")).triu(1)
    mixed: Tensor = x + block.project((scores + mask).softmax(-1) @ block.value(normed))
    return mixed


class OwnPositions(LongModel):
    """Counts positions from 0 in every part."""

    def cut_sequences(self, batch: Any, part: Any) -> Any:
        tokens, targets = part(batch[0]), part(batch[1])
        return tokens, targets, torch.arange(tokens.shape[1])


class ShiftsLate(LongModel):
    """Shifts targets after the cut, which loses one for each part."""

    def loss(self, batch: Any) -> Tensor:
        tokens, targets, positions = batch
        return super().loss((tokens[:, :-1], targets[:, 1:], positions[:-1]))


class CountsRows(LongModel):
    def batch_weight(self, batch: Any) -> int:
        return len(batch[0])


class MeanOfRows(LongModel):
    """Averages each sequence's own mean, which parts cannot know."""

    def loss(self, batch: Any) -> Tensor:
        tokens, targets, positions = batch
        means = [
            super(MeanOfRows, self).loss((x[None], y[None], positions)) for x, y in zip(tokens, targets, strict=True)
        ]
        return torch.stack([mean for mean in means if not mean.isnan()] or [torch.zeros(())]).mean()


class Balances(LongModel):
    """Adds a loss that balances means over tokens, while it trains."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss * (1 + batch[0].float().mean().square()) if self.training else loss


class Counts(LongModel):
    """Keeps its losses in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.kept.append(output.detach())
        return output

    def on_train_end(self) -> None:
        if len(self.kept) != 1:
            raise ConfigurationError(f"{len(self.kept)} losses were kept in one step: use the loss.")


def refused(kind: type[LongModel]) -> str:
    trainer = silent_trainer(strategy="ddp", devices=2, parallel={"cp": 2}, max_steps=1, verbose=False)
    try:
        trainer.fit(kind(), loader(6))
    except ConfigurationError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Counts, "trained"),
        (Balances, "in training mode"),
        (ByHandAttention, "scaled_dot_product_attention"),
        (OwnPositions, "part.positions()"),
        (ShiftsLate, "ShiftsLate"),
        (CountsRows, "CountsRows.batch_weight"),
        (MeanOfRows, "batch_weight"),
    ],
)
def test_a_model_that_parts_would_train_wrongly_is_refused(kind: type[LongModel], words: str) -> None:
    says(run_on_ranks(2, refused, kind), words)


class SaysNothing(TrainModule):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        raise NotImplementedError


class Uncounted(SaysNothing):
    def cut_sequences(self, batch: Any, part: Any) -> Any:
        return part(batch)


class Manual(LongModel):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (SaysNothing(), "SaysNothing.cut_sequences"),
        (Uncounted(), "Uncounted.batch_weight"),
        (Manual(), "automatic_optimization"),
    ],
)
def test_a_module_that_says_nothing_is_refused_before_any_rank_starts(module: TrainModule, words: str) -> None:
    trainer = silent_trainer(strategy="ddp", devices=2, parallel={"cp": 2}, verbose=False)
    with refuses(ConfigurationError, words):
        trainer.fit(module, loader(4))


def test_predictions_and_compiling_are_refused() -> None:
    given: dict[str, Any] = {"strategy": "ddp", "devices": 2, "parallel": {"cp": 2}, "accelerator": "cpu"}
    with refuses(ConfigurationError, "parallel={'cp': 2}", "predict"):
        silent_trainer(**given, verbose=False).predict(SaysNothing(), loader(4))
    with refuses(ConfigurationError, "compile={'backend': 'eager'}"):
        silent_trainer(**given, compile={"backend": "eager"}, verbose=False)


def looped(strategy: str, ranks: int, window: int) -> dict[str, Tensor]:
    """Train in a loop of its own."""
    fabric = Fabric("cpu", strategy, ranks, accumulate=window, parallel={"cp": 2})
    fabric.launch()
    module = LongModel()
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    model.mark_forward_method("loss")
    size = BATCH // fabric.resources.data_size // window
    for step, (tokens, targets) in enumerate(fabric.setup_dataloaders(loader(size))):
        if step == STEPS * window:
            break
        part, positions = (fabric.part(tokens), fabric.part(targets)), fabric.part.positions(tokens)
        with fabric.accumulate(model):
            fabric.backward(model.loss((*part, positions)), weight=module.batch_weight(part))
            fabric.clip_gradients(model, optimizer, max_norm=0.3)
            optimizer.step()
            optimizer.zero_grad()
    return fabric.full_state_dict(model)


@pytest.mark.parametrize(("strategy", "ranks", "window"), [("ddp", 4, 2), ("fsdp", 2, 4)])
def test_a_hand_written_loop_trains_what_one_process_does(strategy: str, ranks: int, window: int) -> None:
    _, expected = by_hand(1, 0.3, STEPS, BATCH)
    found = run_on_ranks(ranks, looped, strategy, ranks, window)[0]
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=1e-4, atol=1e-6)


def forgetful(weight: float | None) -> None:
    fabric = Fabric("cpu", "ddp", 2, parallel={"cp": 2})
    fabric.launch()
    module = LongModel()
    model, _ = fabric.setup(module, module.configure_optimizers())
    tokens, targets = next(iter(fabric.setup_dataloaders(loader(4))))
    fabric.backward(model.loss((tokens, targets, torch.arange(tokens.shape[1]))), weight=weight)


@pytest.mark.parametrize(("weight", "words"), [(None, "backward(loss, weight=...)"), (9.0, "was cut")])
def test_a_loop_that_does_not_cut_or_weigh_is_refused(weight: float | None, words: str) -> None:
    with pytest.raises(AssertionError) as caught:
        run_on_ranks(2, forgetful, weight)
    assert words in str(caught.value)


def test_parts_are_cut_in_order_and_lengths_that_do_not_divide_are_refused() -> None:
    tokens = torch.arange(12).view(1, 12)
    assert SequencePart(1, 3)(tokens).tolist() == [[4, 5, 6, 7]]
    assert SequencePart(1, 3)(tokens.T, dim=0).shape == (4, 1)
    assert SequencePart(2, 3).positions(tokens).tolist() == [8, 9, 10, 11]
    assert SequencePart()(tokens).tolist() == tokens.tolist()
    with refuses(DataError, "[1, 12]", "cp=5"):
        SequencePart(0, 5)(tokens)


def attended(heads: int, keys: int) -> tuple[Tensor, Tensor]:
    """Return the largest differences of the output and of the gradients to those of full sequences."""
    torch.manual_seed(0)
    whole = [torch.randn(2, count, 8, 4, requires_grad=True) for count in (heads, keys, keys)]
    attention: Any = nn.functional.scaled_dot_product_attention
    expected = attention(*whole, is_causal=True, enable_gqa=True)
    expected.square().sum().backward()
    strategy = DDPStrategy().with_degrees(Degrees(cp=2))
    strategy.connect("cpu", 1, resolve_precision(None))
    parts = [strategy.part(each.detach(), 2).clone().requires_grad_() for each in whole]
    found = strategy.route(lambda: attention(*parts, is_causal=True, enable_gqa=True), training=False)()
    found.square().sum().backward()
    wanted = [strategy.part(each.grad, 2) for each in whole if each.grad is not None]
    gradients = [(part.grad - grad).abs().max() for part, grad in zip(parts, wanted, strict=True)]  # type: ignore[operator]
    return (found - strategy.part(expected, 2)).abs().max(), torch.stack(gradients).max()


@pytest.mark.parametrize(("heads", "keys"), [(4, 2), (4, 1)])
def test_attention_of_parts_is_that_of_full_sequences(heads: int, keys: int) -> None:
    for output, gradients in run_on_ranks(2, attended, heads, keys):
        assert output < 1e-6
        assert gradients < 1e-5


def test_heads_that_do_not_divide_and_masks_are_refused() -> None:
    for message in run_on_ranks(2, message_of, 3, False) + run_on_ranks(2, message_of, 4, True):
        assert "use cp out of the divisors of 3" in message or "give is_causal=True, or no mask" in message


def message_of(heads: int, masks: bool) -> str:
    strategy = DDPStrategy().with_degrees(Degrees(cp=2))
    strategy.connect("cpu", 1, resolve_precision(None))
    x, mask = torch.zeros(1, heads, 4, 2), torch.ones(4, 4, dtype=torch.bool)
    attention = nn.functional.scaled_dot_product_attention
    with pytest.raises(ConfigurationError) as caught:
        strategy.route(lambda: attention(x, x, x, attn_mask=mask if masks else None), training=False)()
    return str(caught.value)
