"""Expert parallelism: ranks that hold different experts train and evaluate as one process; see also test_meshes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from long_sequences import LENGTH, WIDTH, LongModel, loader, rows
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from phalanx import Callback, Fabric, TrainModule
from phalanx.callbacks import EMAWeightAveraging
from phalanx.strategies import FSDPStrategy

STEPS, BATCH, EXPERTS = 3, 16, 6


class Shapes(Callback):
    """Notes the shapes of this rank's experts, and the layer's own number of experts."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        experts = module.blocks[0].mixture.experts
        self.seen = [tuple(experts.widen.shape), tuple(experts.widen.to_local().shape), experts.num_experts]


def trained(parallel: dict[str, int], settings: dict[str, Any], strategy: dict[str, Any]) -> Any:
    module, shapes = LongModel(experts=EXPERTS), Shapes()
    average = EMAWeightAveraging(decay=0.5)
    trainer = silent_trainer(
        strategy=FSDPStrategy(gather_weights="all", **strategy),
        devices=2,
        parallel=parallel,
        max_steps=STEPS,
        limit_train_batches=STEPS,
        gradient_clip_val=0.3,
        num_sanity_val_steps=0,
        callbacks=[shapes, average],
        verbose=False,
        **settings,
    )
    size = BATCH // trainer.fabric.resources.data_size
    trainer.fit(module, loader(size), loader(3, 7))
    weights = {name: each.detach().float() for name, each in module.named_parameters()}
    return weights, {name: float(value) for name, value in trainer.callback_metrics.items()}, shapes.seen


@cache
def averaged_by_hand() -> dict[str, Tensor]:
    """Return torch's averages of the weights of one process."""
    module, data = LongModel(experts=EXPERTS), rows()
    average: Any = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = module.configure_optimizers()
    for start in range(0, STEPS * BATCH, BATCH):
        tokens, targets = (torch.stack(each) for each in zip(*data[start : start + BATCH], strict=True))
        optimizer.zero_grad()
        module.loss((tokens, targets, torch.arange(LENGTH))).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        optimizer.step()
        average.update_parameters(module)
    return {name: each.detach() for name, each in average.module.named_parameters()}


@cache
def sharded(**settings: Any) -> Any:
    """Train the model with FSDP alone."""
    return run_on_ranks(2, trained, {}, settings, {})


@pytest.mark.parametrize(
    ("settings", "strategy", "tolerance"),
    [
        ({}, {}, 1e-5),
        ({}, {"activation_checkpointing": True, "prefetch": 1}, 1e-5),
        ({}, {"cpu_offload": True}, 1e-5),
        ({"memory": "selective"}, {"reshard_after_forward": False, "units": 600}, 1e-5),
        ({"precision": "bf16-mixed"}, {}, 2e-2),
    ],
)
def test_weights_metrics_and_averages_are_those_of_fsdp(
    settings: dict[str, Any], strategy: dict[str, Any], tolerance: float
) -> None:
    plain = sharded(**settings)
    expected = averaged_by_hand()
    for (weights, metrics, seen), (others, wanted, _) in zip(
        run_on_ranks(2, trained, {"ep": 2}, settings, strategy), plain, strict=True
    ):
        assert seen == [(EXPERTS, WIDTH, 2 * WIDTH), (EXPERTS // 2, WIDTH, 2 * WIDTH), EXPERTS]
        assert metrics == pytest.approx(wanted, rel=tolerance)
        for name, tensor in weights.items():
            # After the fit, the module has the averages.
            torch.testing.assert_close(tensor, others[name], rtol=10 * tolerance, atol=tolerance)
            if "precision" not in settings:
                torch.testing.assert_close(tensor, expected[name], rtol=10 * tolerance, atol=tolerance)


class BuiltLater(LongModel):
    """Builds its blocks under the strategy, without data, and names them before that."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()

    def configure_model(self) -> None:
        if not len(self.blocks):
            torch.manual_seed(11)
            self.blocks = LongModel(experts=EXPERTS).blocks


def built(parallel: dict[str, int] | None) -> list[tuple[float, float]]:
    ranks = 2 if parallel else 1
    module = BuiltLater()
    trainer = silent_trainer(
        strategy="fsdp" if parallel else "single", devices=ranks, parallel=parallel, max_steps=3, verbose=False
    )
    trainer.fit(module, loader(8 // ranks))
    return module.sums


def test_layers_that_configure_model_builds_are_divided() -> None:
    expected = torch.tensor(built(None), dtype=torch.float64)
    found = torch.tensor(run_on_ranks(2, built, {"ep": 2}), dtype=torch.float64).sum(0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


class SameNumbers(LongModel):
    """Has experts with attributes that are the number of experts by chance."""

    def __init__(self) -> None:
        super().__init__(experts=EXPERTS)
        self.seen: set[Any] = set()
        for block in self.blocks:
            experts: Any = block.get_submodule("mixture.experts")
            experts.expert_dim = experts.num_experts_per_tok = experts.expert_count = EXPERTS
            experts.forward = self.noted(experts)

    def noted(self, experts: Any) -> Any:
        forward = experts.forward

        def run(hidden: Tensor, index: Tensor, weights: Tensor) -> Any:
            self.seen.add((experts.num_experts, experts.expert_count, experts.expert_dim, experts.num_experts_per_tok))
            return forward(hidden, index, weights)

        return run


def numbers() -> Any:
    module = SameNumbers()
    trainer = silent_trainer(strategy="fsdp", devices=2, parallel={"ep": 2}, max_steps=1, verbose=False)
    trainer.fit(module, loader(4))
    return module.seen


def test_only_numbers_of_experts_are_those_of_a_rank() -> None:
    half = EXPERTS // 2
    assert run_on_ranks(2, numbers) == [{(half, half, EXPERTS, EXPERTS)}] * 2


class OneForAll(LongModel):
    """Sends every token to the experts 0 and 1, which the first rank holds."""

    def __init__(self) -> None:
        super().__init__(experts=EXPERTS)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        for block in self.blocks:
            mixture: Any = block.get_submodule("mixture")
            mixture.router.weight.requires_grad_(False)
            mixture.router.weight.detach().copy_(torch.zeros(EXPERTS, WIDTH))
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2)


def skewed(parallel: dict[str, int] | None, count: int) -> Any:
    module = OneForAll()
    trainer = silent_trainer(
        strategy=FSDPStrategy(gather_weights="all") if parallel else "single",
        devices=2 if parallel else 1,
        parallel=parallel,
        max_epochs=1,
        gradient_clip_val=0.3,
        verbose=False,
    )
    trainer.fit(module, loader(8 // trainer.fabric.resources.data_size, count))
    return {name: each.detach() for name, each in module.named_parameters()}


def test_a_rank_without_tokens_for_its_experts_or_without_a_batch_takes_part() -> None:
    # The last batch has one sequence, so one rank has a filler batch.
    expected = skewed(None, 17)
    for weights in run_on_ranks(2, skewed, {"ep": 2}, 17):
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


class Predicts(LongModel):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def predicted(parallel: dict[str, int] | None) -> Any:
    trainer = silent_trainer(
        strategy="fsdp" if parallel else "single", devices=2 if parallel else 1, parallel=parallel, verbose=False
    )
    found = trainer.predict(Predicts(experts=EXPERTS), loader(1, 7))
    return [] if found is None else found


def test_predictions_of_an_odd_number_of_batches() -> None:
    expected = predicted(None)
    found = run_on_ranks(2, predicted, {"ep": 2})
    torch.testing.assert_close(torch.stack(found[0]), torch.stack(expected), rtol=1e-5, atol=0)


class Breaks(LongModel):
    """Has a loss that is not finite in one step, on one rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 1 and self.global_rank == 0 else loss


def guarded() -> int:
    module = Breaks(experts=EXPERTS)
    trainer = silent_trainer(
        strategy=FSDPStrategy(gather_weights="all"),
        devices=2,
        parallel={"ep": 2},
        max_steps=4,
        nonfinite="skip",
        verbose=False,
    )
    trainer.fit(module, loader(4))
    assert all(each.isfinite().all() for each in module.parameters())
    return trainer.global_step


def test_a_loss_that_is_not_finite_skips_the_update_on_all_ranks() -> None:
    assert run_on_ranks(2, guarded) == [4, 4]


class Own(nn.Module):
    """A model that is not a ``TrainModule``, with a method that names its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = LongModel(experts=EXPERTS)

    def forward(self, batch: Any) -> Tensor:
        return self.inner.loss(batch)

    def configure_expert_parallel(self) -> list[nn.Module]:
        return [block.get_submodule("mixture.experts") for block in self.inner.blocks]


def in_own_loop(parallel: dict[str, int] | None) -> list[float]:
    ranks = 2 if parallel else 1
    strategy = "fsdp" if parallel else "single"
    fabric = Fabric(strategy=strategy, devices=ranks, accelerator="cpu", parallel=parallel)
    module: Any = Own()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    losses = []
    for tokens, targets in fabric.setup_dataloaders(loader(8 // ranks, 32, padded=False)):
        loss = model((tokens, targets, torch.arange(tokens.shape[1])))
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.3)
        optimizer.step()
        losses.append(float(fabric.all_reduce(loss.detach(), "mean")))
    return losses


def test_a_loop_of_your_own_with_a_fabric() -> None:
    expected = in_own_loop(None)
    for losses in run_on_ranks(2, in_own_loop, {"ep": 2}):
        assert losses == pytest.approx(expected, rel=1e-5)


class Unnamed(TrainModule):
    """A module whose model has layers of experts that are known."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.AutoConfig.for_model(
            kind,
            vocab_size=29,
            hidden_size=16,
            intermediate_size=24,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
        )
        torch.manual_seed(5)
        self.net: Any = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        self.sums: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch[0], labels=batch[0]).loss
        self.sums.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def tuned(kind: str, implementation: str, parallel: dict[str, int] | None) -> Any:
    ranks = 2 if parallel else 1
    module = Unnamed(kind)
    module.net.set_experts_implementation(implementation)
    trainer = silent_trainer(
        strategy=FSDPStrategy(gather_weights="all") if parallel else "single",
        devices=ranks,
        parallel=parallel,
        max_steps=20,
        gradient_clip_val=0.5,
        verbose=False,
    )
    trainer.fit(module, loader(4 // ranks, padded=False))
    return module.sums, {name: each.detach() for name, each in module.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [("mixtral", "grouped_mm"), ("qwen2_moe", "eager"), ("qwen3_moe", "grouped_mm")],
)
def test_models_of_transformers_are_divided_without_a_method(kind: str, implementation: str) -> None:
    losses, weights = tuned(kind, implementation, None)
    results = run_on_ranks(2, tuned, kind, implementation, {"ep": 2})
    found = torch.tensor([result[0] for result in results], dtype=torch.float64).mean(0)
    torch.testing.assert_close(found, torch.tensor(losses, dtype=torch.float64), rtol=1e-5, atol=0)
    for _, own in results:
        torch.testing.assert_close(own, weights, rtol=1e-3, atol=1e-4)
