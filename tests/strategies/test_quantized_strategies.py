"""torchao's optimizers with quantized state under every registered strategy, and beside what sets learning rates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import silent_trainer, weights_of
from quantized_model import KINDS, ROWS, STEPS, QuantizedModel, data, quantized, trained
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch_strategies import RANKS

from phalanx.callbacks import BackboneFinetuning, StochasticWeightAveraging
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.core.registry import STRATEGIES
from phalanx.framework.system.environment import variables_set

WINDOW = 2


def by_hand(kind: str) -> tuple[list[float], Tensor]:
    """Return the loss of each step and the weights of the same run in plain torch and torchao."""
    module = QuantizedModel(kind)
    ([optimizer], [schedule]) = module.configure_optimizers()
    with torch.compiler.set_stance("force_eager"):
        for batch in data(ROWS):
            optimizer.zero_grad()
            for rows in zip(*(part.chunk(WINDOW) for part in batch), strict=True):
                (module.training_step(rows, 0) / WINDOW).backward()
            optimizer.step()
            schedule["scheduler"].step()
    return module.losses, weights_of(module)


def three_runs(name: str, kind: str, root: str) -> list[tuple[list[float], Tensor | None]]:
    runs = (("whole", STEPS, None), ("parts", 2, None), ("parts", STEPS, f"{root}/parts/2.ckpt"))
    return [trained(name, RANKS[name], kind, f"{root}/{each}", stop, ckpt, WINDOW) for each, stop, ckpt in runs]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("single", KINDS[0]),
        ("ddp", KINDS[1]),
        ("fsdp", KINDS[0]),
        ("fsdp", KINDS[2]),
        ("hsdp", KINDS[1]),
        ("fsdp-offload", KINDS[0]),
    ],
)
def test_a_run_is_torchaos_and_resumes_bit_for_bit(name: str, kind: str, tmp_path: Path) -> None:
    ranks, args = RANKS[name], (name, kind, str(tmp_path))
    found = [three_runs(*args)] if ranks == 1 else run_on_ranks(ranks, three_runs, *args)
    for (whole, _), (first, _), (rest, _) in found:
        assert first + rest == whole
    (_, weights), _, (_, resumed) = found[0]
    assert weights is not None
    assert resumed is not None
    assert torch.equal(weights, resumed)
    expected, expected_weights = by_hand(kind)
    if ranks == 1:
        assert found[0][0][0] == expected
        assert torch.equal(weights, expected_weights)
    else:
        # Sums in another order change gradients in the last digit, and with them some codes of the state.
        means = torch.tensor([runs[0][0] for runs in found]).view(ranks, STEPS, -1).mean((0, 2))
        torch.testing.assert_close(means, torch.tensor(expected).view(STEPS, -1).mean(1), rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-2)


def refused_kinds(name: str, folder: str) -> list[str]:
    messages = []
    for kind in KINDS:
        module = QuantizedModel(kind)
        with variables_set({"PHALANX_NVME_PATH": folder}), pytest.raises(ConfigurationError) as caught:
            silent_trainer(devices=2, strategy=name, max_steps=1).fit(module, data(ROWS // 2))
        messages.append(str(caught.value))
        assert not module.losses
    return messages


# test_pipeline_refusals.py has pipelines, which need windows of several micro-batches.
@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - set(RANKS) - {"pipeline"}))
def test_every_other_strategy_refuses_quantized_state_by_name(name: str, tmp_path: Path) -> None:
    for messages in run_on_ranks(2, refused_kinds, name, str(tmp_path)):
        assert [message.split()[0] for message in messages] == list(KINDS)
        for message in messages:
            assert "quantizes its state in blocks of a parameter, and ZeRO stage" in message
            assert "\n" not in message


# ---- learning rates --------------------------------------------------------------------------------------------------

# One for each way in which schedules of torch set rates.
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=STEPS + 1, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.5, 1.0, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.ConstantLR(o, 0.5, 2)], o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0),
}


class Scheduled(QuantizedModel):
    """Trains with a schedule, and notes the learning rate of each step."""

    def __init__(self, schedule: Callable[[Any], Any], kind: str) -> None:
        super().__init__(kind)
        self.schedule = schedule
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss, and log it for a schedule that reads it."""
        group = self.trainer.optimizers[0].param_groups[0]
        assert isinstance(group["lr"], Tensor) is (self.kind != "plain")
        self.rates.append(float(group["lr"]))
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return torchao's optimizer, or torch's own for comparison, with the schedule."""
        plain = torch.optim.AdamW(self.parameters(), lr=1e-2)
        optimizer = plain if self.kind == "plain" else quantized(self.kind, self.parameters())
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": "step", "monitor": "loss"}]


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_torch_change_the_rate_of_a_quantized_optimizer(name: str) -> None:
    rates = []
    for kind in ("plain", "AdamW8bit"):
        module = Scheduled(SCHEDULES[name], kind)
        with torch.compiler.set_stance("force_eager"):
            silent_trainer(max_steps=STEPS).fit(module, data(ROWS))
        rates.append(module.rates)
    plain, tensors = rates
    assert len(set(plain)) > 1
    assert tensors == pytest.approx(plain, rel=1e-5)


class WithBackbone(QuantizedModel):
    """Has a backbone that is unfrozen in a later epoch."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.backbone = nn.Linear(64, 64)
        self.rates: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of inputs that went through the backbone."""
        groups = self.trainer.optimizers[0].param_groups
        assert all(isinstance(group["lr"], Tensor) for group in groups)
        assert len({id(group["lr"]) for group in groups}) == len(groups)
        self.rates.append([float(group["lr"]) for group in groups])
        return super().training_step((self.backbone(batch[0]), batch[1]), batch_idx)

    def configure_optimizers(self) -> Any:
        """Return the optimizer of what is not frozen."""
        return quantized(self.kind, [one for one in self.parameters() if one.requires_grad])


@pytest.mark.parametrize("initial", [None, 1e-3])
def test_callbacks_that_set_rates_keep_the_tensors_of_a_quantized_optimizer(initial: float | None) -> None:
    callbacks = [
        BackboneFinetuning(1, backbone_initial_lr=initial, lambda_func=lambda epoch: 20.0, verbose=True),
        StochasticWeightAveraging(swa_lrs=1e-4, swa_epoch_start=4, annealing_epochs=1),
    ]
    module = WithBackbone("AdamW8bit")
    with torch.compiler.set_stance("force_eager"):
        silent_trainer(max_epochs=5, limit_train_batches=1, callbacks=callbacks).fit(module, data(ROWS))
    frozen, *thawed = module.rates
    assert frozen == pytest.approx([1e-2])
    # The third epoch would have 20 times the rate, which may not exceed that of the first group.
    expected = [[1e-2, 1e-3], [1e-2, 1e-2], [1e-2, 1e-2], [1e-4, 1e-4]]
    assert [rate for rates in thawed for rate in rates] == pytest.approx([one for pair in expected for one in pair])
