"""Actions of the table of semantics on optimizers, and training steps under manual optimization."""

from __future__ import annotations

from typing import Any

import torch
from semantic_program import Action, sgd
from torch import Tensor, nn

OPTIMIZERS = "using optimizers"


def blocks_alone(module: Any) -> torch.optim.Optimizer:
    return sgd(module.blocks.parameters())


def two_groups(module: Any) -> torch.optim.Optimizer:
    return sgd([{"params": module.blocks.parameters()}, {"params": [module.embed.weight], "lr": 0.01}])


def adamw_of_all(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-3)


def two_optimizers(module: Any) -> list[torch.optim.Optimizer]:
    rest = [p for name, p in module.named_parameters() if not name.startswith("blocks.")]
    return [sgd(module.blocks.parameters()), sgd(rest, lr=0.01)]


def step_in_turn(module: Any, rows: Tensor) -> None:
    for optimizer in module.optimizers():
        optimizer.zero_grad()
        module.manual_backward(module.loss(rows))
        optimizer.step()


def step_with_closure(module: Any, rows: Tensor) -> None:
    optimizer = module.optimizers()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = module.loss(rows)
        module.manual_backward(loss)
        return loss

    optimizer.step(closure)


def sharpness_aware(module: Any, rows: Tensor) -> None:
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(module.loss(rows))
    with torch.no_grad():
        moves = [(p, 0.1 * p.grad) for p in module.parameters() if p.grad is not None]
        for parameter, move in moves:
            parameter.add_(move)
    optimizer.zero_grad()
    module.manual_backward(module.loss(rows))
    with torch.no_grad():
        for parameter, move in moves:
            parameter.sub_(move)
    optimizer.step()


def two_backwards(module: Any, rows: Tensor) -> None:
    optimizer = module.optimizers()
    optimizer.zero_grad()
    loss = module.loss(rows)
    module.manual_backward(loss, retain_graph=True)
    module.manual_backward(0.5 * loss)
    optimizer.step()


def two_losses(module: Any, rows: Tensor) -> None:
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(module.loss(rows))
    module.manual_backward(0.5 * module.loss(rows.flip(0)[:, :6]))
    optimizer.step()


def every_second_update(module: Any, rows: Tensor) -> None:
    optimizer = module.optimizers()
    module.manual_backward(module.loss(rows))
    module.values["count"] = module.values.get("count", 0) + 1
    if module.values["count"] % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()


def clipped_by_module(module: Any, rows: Tensor) -> None:
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(module.loss(rows))
    nn.utils.clip_grad_norm_(module.blocks.parameters(), 0.05)
    optimizer.step()


def set_rate(module: Any, trainer: Any, moment: str) -> None:
    trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


def read_momentum(module: Any, trainer: Any, moment: str) -> list[float]:
    state = trainer.optimizers[0].state
    return [float(state[w]["momentum_buffer"].norm()) for w in (module.embed.weight, module.blocks[1].widen.weight)]


def drop_momentum(module: Any, trainer: Any, moment: str) -> None:
    for state in trainer.optimizers[0].state.values():
        state["momentum_buffer"].zero_()


def manual(name: str, step: Any, **more: Any) -> Action:
    """Return an action that is a training step under manual optimization."""
    return Action(name, OPTIMIZERS, ("training_step",), step=step, **more)


RATES = ("on_fit_start", "on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end")
ACTIONS = [
    Action("optimizer with only some of the parameters", OPTIMIZERS, ("training_step",), optimizer=blocks_alone),
    Action("parameter groups with only some of the parameters", OPTIMIZERS, ("training_step",), optimizer=two_groups),
    Action("`AdamW`", OPTIMIZERS, ("training_step",), optimizer=adamw_of_all),
    Action("learning rate changed in a hook", OPTIMIZERS, RATES, set_rate),
    Action("momentum buffers read", OPTIMIZERS, ("on_train_batch_end", "callback.on_train_epoch_end"), read_momentum),
    Action("momentum buffers set to zero", OPTIMIZERS, ("on_train_batch_end", "on_train_epoch_end"), drop_momentum),
    manual("two optimizers, stepped one after the other", step_in_turn, optimizer=two_optimizers),
    manual("`step(closure)`", step_with_closure),
    manual("sharpness-aware minimization (SAM)", sharpness_aware),
    manual("two backward passes with `retain_graph=True`", two_backwards),
    manual("two losses with separate backward passes", two_losses),
    manual("optimizer step after every second batch", every_second_update),
    manual("`clip_grad_norm_` under manual optimization", clipped_by_module),
]
