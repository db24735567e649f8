"""``Split`` and optimizers that need full parameters: every strategy updates as one process of plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from language_model import token_loader
from messages import refuses, says
from models import Regressor, loader, plain_steps, silent_trainer
from ranks import run_on_ranks
from split_model import SplitModel, by_hand, mean_losses, paths, trained
from torch import Tensor
from torch.optim import Optimizer

from phalanx import Split
from phalanx.framework.core.errors import ConfigurationError

SAVED, END = 3, 6
# test_a_checkpoint_resumes_exactly_and_under_other_strategies trains under the others.
MUON = [("ddp", 2), ("fsdp+tp", 4), ("hsdp", 4), ("fsdp-offload", 2)]


def check(found: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("strategy", "ranks"), MUON)
def test_muon_beside_adamw_equals_plain_torch(strategy: str, ranks: int, tmp_path: Path) -> None:
    check(mean_losses(run_on_ranks(ranks, trained, strategy, ranks, str(tmp_path))), by_hand())


# test_a_checkpoint_resumes_exactly_and_under_other_strategies trains under fsdp and zero2.
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_optimizers_that_update_each_element_equal_plain_torch(strategy: str, tmp_path: Path) -> None:
    found = run_on_ranks(2, trained, strategy, 2, str(tmp_path), "adamw", timeout=120.0)
    check(mean_losses(found), by_hand("adamw"))


@pytest.mark.parametrize(
    ("kind", "first", "others"),
    [
        ("muon", ("single", 1), [("fsdp", 2)]),
        ("muon", ("fsdp", 2), [("single", 1), ("fsdp+tp", 2)]),
        ("muon", ("fsdp+tp", 2), [("ddp", 2)]),
        ("adamw", ("zero2", 2), [("zero3", 2), ("fsdp", 2)]),
    ],
    ids=["single", "fsdp", "fsdp+tp", "zero2"],
)
def test_a_checkpoint_resumes_exactly_and_under_other_strategies(
    kind: str, first: tuple[str, int], others: list[tuple[str, int]], tmp_path: Path
) -> None:
    saves = paths(tmp_path, [SAVED])

    def run(layout: tuple[str, int], resume: str | None) -> list[tuple[list[float], Tensor | None]]:
        strategy, ranks = layout
        arguments = (strategy, ranks, str(tmp_path), kind, END, resume, None if resume else saves)
        return run_on_ranks(ranks, trained, *arguments, timeout=120.0)

    straight = run(first, None)
    check(mean_losses(straight), by_hand(kind)[:END])
    again = run(first, saves[SAVED])
    for (losses, weights), (expected, last) in zip(again, straight, strict=True):
        assert losses == expected[SAVED:]
        assert (weights is None) is (last is None)
        assert weights is None or (last is not None and torch.equal(weights, last))
    for other in others:
        check(mean_losses(run(other, saves[SAVED])), by_hand(kind)[SAVED:END])


class Scaled(Optimizer):
    """Divides each gradient by its norm, and counts its steps."""

    updates_full_parameters = True

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"] / state["step"])


class Adaptive(Regressor):
    """Trains with an optimizer that needs full parameters."""

    def __init__(self, kind: type[Optimizer]) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.05)  # type: ignore[call-arg]


def regressed(
    kind: type[Optimizer], strategy: str, folder: str, stop: int, resume: str | None
) -> tuple[list[float], list[str]]:
    """Train a regression; return the losses and the names of parameters whose state this rank holds."""
    module, held = Adaptive(kind), list[str]()
    arguments = {"devices": 2, "max_steps": stop, "default_root_dir": folder}
    trainer = silent_trainer(strategy=strategy, **arguments)

    def note(*_: Any) -> None:
        state = trainer.optimizers[0].state
        held[:] = [name for name, parameter in module.named_parameters() if parameter in state]

    module.on_train_end = note  # type: ignore[method-assign]
    trainer.fit(module, loader(batch_size=4), ckpt_path=resume)
    if resume is None:
        trainer.save_checkpoint(f"{folder}/last")
    return module.losses, held


@pytest.mark.parametrize("kind", [Scaled, torch.optim.Adafactor])
def test_optimizers_that_need_full_parameters_update_them_on_one_rank_each(kind: Any, tmp_path: Path) -> None:
    module = Regressor()
    optimizer = kind(module.parameters(), lr=0.05)
    expected = plain_steps(optimizer, lambda batch: module.training_step(batch, 0), loader(batch_size=8))

    straight = run_on_ranks(2, regressed, kind, "fsdp", str(tmp_path), 5, None)
    resumed = run_on_ranks(2, regressed, kind, "ddp", str(tmp_path), 8, f"{tmp_path}/last")

    check(mean_losses(straight), expected[:5])
    check(mean_losses(resumed), expected[5:])
    names = [name for name, _ in module.named_parameters()]
    assert sorted(straight[0][1] + straight[1][1]) == sorted(names)
    assert all(held for _, held in straight)


class WithLBFGS(Regressor):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def refusal(module: str, strategy: str) -> str:
    trainer = silent_trainer(strategy=strategy, devices=2, max_steps=1)
    built, data = (WithLBFGS(), loader()) if module == "lbfgs" else (SplitModel(), token_loader(16))
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(built, data)
    return str(caught.value)


@pytest.mark.parametrize(
    ("module", "strategy", "names"),
    [
        ("muon", "zero1", ["Muon", "ZeRO stage 1"]),
        ("muon", "zero3", ["Muon", "ZeRO stage 3"]),
        ("lbfgs", "fsdp", ["LBFGS", "strategy='fsdp'"]),
    ],
)
def test_strategies_refuse_what_they_cannot_update(module: str, strategy: str, names: list[str]) -> None:
    says(run_on_ranks(2, refusal, module, strategy), *names)


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path: Path) -> None:
    trained("single", 1, str(tmp_path), "muon", 2, None, paths(tmp_path, [1]))
    saved = paths(tmp_path, [1])[1]
    with refuses(Exception, "Split(Muon, AdamW)", "Split(AdamW, AdamW)"):
        trained("single", 1, str(tmp_path), "adamw", 3, saved)
    assert isinstance(SplitModel().configure_optimizers()["optimizer"], Split)
