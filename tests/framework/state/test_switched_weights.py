"""Schedule-free optimizers switch their weights for evaluation, in checkpoints and at the end, under every strategy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import Regressor, loader, network, regression_data, silent_trainer, weights_of
from ranks import run_on_ranks
from safetensors.torch import load_file
from schedulefree import AdamWScheduleFree, RAdamScheduleFree, SGDScheduleFree
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from phalanx import Split, Trainer
from phalanx.callbacks import EMAWeightAveraging, LambdaCallback, WeightAveraging
from phalanx.framework.core.errors import ConfigurationError

SAVED, EVERY, END = 6, 4, 12
KINDS: dict[str, Any] = {
    "adamw": partial(AdamWScheduleFree, lr=0.02, warmup_steps=3, weight_decay=0.01),
    "sgd": partial(SGDScheduleFree, lr=0.5),
    "radam": partial(RAdamScheduleFree, lr=0.05),
}


def optimizer_of(kind: str, module: nn.Module) -> Optimizer:
    if kind == "split":
        return Split(module.named_parameters(), {"*.weight": KINDS["adamw"], "*": partial(SGD, lr=0.1)})
    made: Optimizer = KINDS[kind](module.parameters())
    return made


class ScheduleFree(Regressor):
    """Notes the losses of training and validation."""

    def __init__(self, kind: str = "adamw") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kind = kind
        self.validated: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.validated.append(loss.item())

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.kind, self)


Found = tuple[list[float], list[float], Tensor]


def by_hand(kind: str, steps: int = END) -> Found:
    """Train in plain torch; return the losses, those of validation every four steps, and the weights to evaluate."""
    module, (x, y) = Regressor(), regression_data().tensors
    optimizer = optimizer_of(kind, module)
    modes: list[Any] = optimizer.optimizers[:1] if isinstance(optimizer, Split) else [optimizer]
    modes[0].train()
    losses, validated = [], []
    for step in range(steps):
        rows = slice(step * 8 % 64, step * 8 % 64 + 8)
        loss = nn.functional.mse_loss(module(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % EVERY == 0:
            kept = [parameter.detach().clone() for parameter in module.parameters()]
            modes[0].eval()
            with torch.no_grad():
                validated.append(nn.functional.mse_loss(module(x[:8]), y[:8]).item())
            modes[0].train()
            for parameter, own in zip(module.parameters(), kept, strict=True):
                parameter.data.copy_(own)
    modes[0].eval()
    return losses, validated, weights_of(module)


def trained(
    kind: str, strategy: str, ranks: int, folder: str, resume: str | None = None, validates: bool = True
) -> Found:
    """Train; save in a step, within a validation, and after the fit. Runs on each rank."""

    def in_step(trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED and resume is None:
            trainer.save_checkpoint(f"{folder}/step")
            trainer.export(f"{folder}/plain.safetensors")

    def in_validation(trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2 * EVERY and resume is None:
            trainer.save_checkpoint(f"{folder}/validation")

    module = ScheduleFree(kind)
    trainer = silent_trainer(
        strategy=strategy,
        devices=ranks,
        max_steps=END,
        val_check_interval=EVERY,
        callbacks=[LambdaCallback(on_train_batch_end=in_step, on_validation_epoch_end=in_validation)],
        default_root_dir=folder,
        num_sanity_val_steps=1,
    )
    shown = loader(8, batch_size=8 // ranks) if validates else None
    trainer.fit(module, loader(batch_size=8 // ranks), shown, ckpt_path=resume)
    if resume is None:
        trainer.save_checkpoint(f"{folder}/ended")
    held = not any(parameter.is_meta for parameter in module.parameters())
    return module.losses, module.validated, weights_of(module) if held else torch.empty(0)


def mean(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).mean(0)


def check(found: list[Found], expected: Found, steps: slice = slice(None)) -> None:
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    close(mean([losses for losses, _, _ in found]), torch.tensor(expected[0], dtype=torch.float64)[steps])
    close(found[0][2], expected[2])


@pytest.mark.parametrize(
    ("kind", "strategy", "ranks"),
    [
        *((kind, "single", 1) for kind in (*KINDS, "split")),
        *(("adamw", strategy, 2) for strategy in ("ddp", "fsdp", "fsdp-offload")),
        ("split", "fsdp", 2),
    ],
)
def test_a_fit_switches_the_weights_and_resumes_exactly(kind: str, strategy: str, ranks: int, tmp_path: Path) -> None:
    straight = run_on_ranks(ranks, trained, kind, strategy, ranks, str(tmp_path))

    check(straight, expected := by_hand(kind))
    shown = mean([validated[-3:] for _, validated, _ in straight])
    torch.testing.assert_close(shown, torch.tensor(expected[1], dtype=torch.float64), rtol=1e-5, atol=1e-7)
    # Validation leaves no trace.
    without = run_on_ranks(ranks, trained, kind, strategy, ranks, str(tmp_path / "without"), None, False)
    assert [losses for losses, _, _ in without] == [losses for losses, _, _ in straight]
    assert torch.equal(without[0][2], straight[0][2])
    # Checkpoints and exports hold the weights to evaluate.
    at_save = by_hand(kind, SAVED)[2]
    for loaded in (ScheduleFree.load_from_checkpoint(tmp_path / "step"), exported(tmp_path / "plain.safetensors")):
        torch.testing.assert_close(weights_of(loaded), at_save, rtol=1e-5, atol=1e-6)
    ended = ScheduleFree.load_from_checkpoint(tmp_path / "ended")
    assert torch.equal(weights_of(ended), straight[0][2])
    for name, step in (("step", SAVED), ("validation", 2 * EVERY)):
        again = run_on_ranks(ranks, trained, kind, strategy, ranks, str(tmp_path), str(tmp_path / name))
        assert [losses for losses, _, _ in again] == [losses[step:] for losses, _, _ in straight]
        assert torch.equal(again[0][2], straight[0][2])


def exported(path: Path) -> nn.Module:
    module = ScheduleFree()
    module.load_state_dict(load_file(path))
    return module


def test_a_checkpoint_resumes_under_another_strategy(tmp_path: Path) -> None:
    expected = by_hand("adamw")
    run_on_ranks(2, trained, "adamw", "fsdp", 2, str(tmp_path / "a"))
    run_on_ranks(1, trained, "adamw", "single", 1, str(tmp_path / "b"))
    to_single = run_on_ranks(1, trained, "adamw", "single", 1, str(tmp_path), str(tmp_path / "a" / "step"))
    to_fsdp = run_on_ranks(2, trained, "adamw", "fsdp", 2, str(tmp_path), str(tmp_path / "b" / "validation"))
    check(to_single, expected, slice(SAVED, None))
    check(to_fsdp, expected, slice(2 * EVERY, None))


def continued(folder: str, steps: int, resume: str | None) -> list[float]:
    module = ScheduleFree()
    trainer = silent_trainer(max_steps=steps, default_root_dir=folder)
    trainer.fit(module, loader(batch_size=8), ckpt_path=resume)
    if resume is None:
        trainer.save_checkpoint(f"{folder}/ended")
    return module.losses


def test_a_checkpoint_of_an_ended_fit_continues_exactly(tmp_path: Path) -> None:
    whole = continued(str(tmp_path / "whole"), 8, None)
    assert continued(str(tmp_path), 4, None) == whole[:4]
    assert continued(str(tmp_path), 8, str(tmp_path / "ended")) == whole[4:]


def test_an_average_is_of_the_weights_of_training(tmp_path: Path) -> None:
    module, validated = ScheduleFree(), list[float]()
    average = EMAWeightAveraging(decay=0.5)
    trainer = silent_trainer(max_steps=4, val_check_interval=4, callbacks=[average], default_root_dir=tmp_path)
    trainer.fit(module, loader(batch_size=8), loader(8, batch_size=8))
    validated = module.validated

    net, (x, y) = network(), regression_data().tensors
    optimizer = KINDS["adamw"](net.parameters())
    optimizer.train()
    owns: list[Tensor] = []
    for step in range(4):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x[step * 8 :][:8]), y[step * 8 :][:8]).backward()
        optimizer.step()
        live = [parameter.detach().clone() for parameter in net.parameters()]
        owns = [own.lerp(new, 0.5) for own, new in zip(owns, live, strict=True)] if owns else live
    for parameter, own in zip(net.parameters(), owns, strict=True):
        parameter.data.copy_(own)
    assert validated[-1] == pytest.approx(nn.functional.mse_loss(net(x[:8]), y[:8]).item(), rel=1e-5)


def test_an_average_cannot_have_the_name_of_the_weights_of_training() -> None:
    with refuses(ConfigurationError, "'training'"):
        silent_trainer(max_steps=1, callbacks=[WeightAveraging(name="training")]).fit(ScheduleFree(), loader())


def refusal(strategy: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        silent_trainer(strategy=strategy, devices=2, max_steps=1).fit(ScheduleFree(), loader())
    return str(caught.value)


def test_deepspeed_refuses_them() -> None:
    for told in run_on_ranks(2, refusal, "zero2"):
        assert "AdamWScheduleFree switches the weights between training and evaluation itself, and ZeRO stage 2" in told
