"""The program of a cell of the table of semantics in plain torch: the loop a user would write, on global batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from language_model import tokens
from semantic_program import EPOCHS, GLOBAL_BATCH, ROWS, Action, Outcome, Program, program, weights_of
from torch import Tensor


class Plain(Program):
    """The program where there is no Trainer: what steps and hooks call is plain torch."""

    trainer: Any = None
    optimizer_list: Sequence[torch.optim.Optimizer] = ()
    current_epoch = global_step = 0

    def __init__(self) -> None:
        self.logged: dict[str, list[float]] = defaultdict(list)
        super().__init__()
        self.parts: list[Tensor] = []

    def __setattr__(self, name: str, value: Any) -> None:
        # Those that are set before nn.Module's own __init__, and its children that are Train modules.
        object.__setattr__(self, name, value) if name == "logged" else super().__setattr__(name, value)

    def log(self, name: str, value: Any, **_: Any) -> None:  # type: ignore[override]
        self.logged[name].append(float(value))

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return self.optimizer_list[0] if len(self.optimizer_list) == 1 else list(self.optimizer_list)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    def over_ranks(self, how: str, function: Callable[[Tensor], Tensor]) -> Any:
        values = [function(part) for part in self.parts]
        return torch.stack(values).mean(0) if how == "mean" else values


def by_hand(action: Action, moment: str, parts: int) -> list[Outcome]:
    """Train with plain torch; return the outcome of each rank with data of its own, all alike but for what they see."""
    module: Plain = program(action, moment, Plain)
    return _PlainLoop(module, parts if action.by_part else 1).run(parts)


class _PlainLoop:
    """The loop that a user would write, on global batches, with the hooks in their order."""

    def __init__(self, module: Plain, parts: int) -> None:
        self.module, self.num_parts = module, parts
        self.seen: list[list[float]] = [[] for _ in range(parts)]
        self.trainer = module.trainer = SimpleNamespace(optimizers=[], callback_metrics={})

    def call(self, *hooks: str) -> None:
        """Do the action if it is the moment of a hook, on each rank alike."""
        for hook in hooks:
            for moment in (hook, f"callback.{hook}"):
                self.module.seen = []
                self.module.act(moment, self.trainer)
                for seen in self.seen:
                    seen += self.module.seen

    def run(self, ranks: int) -> list[Outcome]:
        module = self.module
        self.call("setup", "configure_model")
        made = module.configure_optimizers()
        module.optimizer_list = self.trainer.optimizers = list(made) if isinstance(made, list | tuple) else [made]
        self.call("on_fit_start", "on_train_start")
        rows = tokens(ROWS)
        for module.current_epoch in range(EPOCHS):
            module.logged.clear()
            self.call("on_train_epoch_start")
            for batch in rows.split(GLOBAL_BATCH):
                self.call("on_train_batch_start")
                (self.automatic_step if module.automatic_optimization else self.manual_step)(batch)
                module.global_step += 1
                self.call("on_train_batch_end")
            self.validate()
            self.call("on_train_epoch_end")
        self.call("on_train_end", "on_fit_end", "after fit")
        metrics = {name: sum(values) / len(values) for name, values in module.logged.items()}
        weights = weights_of(module)
        return [Outcome(self.seen[rank % self.num_parts], metrics, weights) for rank in range(ranks)]

    def automatic_step(self, batch: Tensor) -> None:
        """Compute the mean of the losses of the parts, and update."""
        (optimizer,) = self.trainer.optimizers
        loss = torch.stack([self.step_of(part) for part in self.parts_of(batch)]).mean()
        self.call("on_before_zero_grad")
        optimizer.zero_grad()
        self.call("on_before_backward")
        loss.backward()
        self.call("on_after_backward", "manual", "fabric.backward", "on_before_optimizer_step")
        optimizer.step()
        self.call("fabric.step")

    def manual_step(self, batch: Tensor) -> None:
        if self.module.action.step is None:
            self.automatic_step(batch)
        else:
            self.module.parts, self.module.rows, self.module.seen = [batch], batch, self.seen[0]
            self.module.action.step(self.module, batch)

    def parts_of(self, batch: Tensor) -> Sequence[int]:
        self.module.parts = list(batch.chunk(self.num_parts))
        return range(self.num_parts)

    def step_of(self, part: int) -> Tensor:
        """Return the loss of a part, after what it does before."""
        self.module.seen = self.seen[part]
        self.module.rows = self.module.parts[part]
        self.module.act("training_step", self.trainer)
        return self.module.step_loss(self.module.parts[part])

    def validate(self) -> None:
        module, rows = self.module, tokens(GLOBAL_BATCH)
        self.call("on_validation_start", "on_validation_epoch_start")
        module.eval()
        with torch.no_grad():
            for part in self.parts_of(rows):
                module.seen, module.rows = self.seen[part], module.parts[part]
                module.act("validation_step", self.trainer)
                if "validation" in module.moment:
                    module.log("val_loss", module.loss(module.parts[part]))
        module.train()
        self.call("on_validation_epoch_end", "on_validation_end")
