"""The program of a cell of the table of semantics: an ordinary fit in which an action is done at one moment.

``fit`` trains it through a Trainer, ``fabric_loop`` through a Fabric; ``semantic_plain.by_hand`` with plain torch, on
the global batches: the same module, and the same code of the action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from language_model import LanguageModel, token_loader
from models import silent_trainer
from torch import Tensor, nn

from phalanx import Callback, Fabric, TrainModule

# A global batch divides into parts for 1, 2, 3 and 4 ranks, a model into stages for up to 3.
GLOBAL_BATCH, STEPS, EPOCHS, BLOCKS = 12, 2, 2, 3
ROWS = GLOBAL_BATCH * STEPS
_CALLBACK, _FABRIC = "callback.", "fabric."

Edit = Callable[[Any, Any, str], Any]
"""A function of a module and its Trainer. It may return a number or a list of numbers, which are compared."""


@dataclass(frozen=True)
class Action:
    """Something that programs do.

    Args:
        name: a phrase, shown in the table.
        row: the group that it is shown in.
        moments: when it is done: a hook of a module, ``callback.`` and a hook of a callback, several of them joined by
            ``+``, ``__init__``, ``training_step`` for its beginning, ``manual`` for after ``manual_backward``,
            ``after fit``, ``fabric.backward`` and ``fabric.step`` for after these calls of a Fabric's loop.
        edit: what is done at the moment.
        build: adds to a module at the end of its ``__init__``.
        loss: returns the loss of rows, instead of ``module.loss``.
        step: a ``training_step`` under manual optimization, with the module and rows.
        optimizer: returns the optimizers of a module.
        by_part: each part of a global batch does something of its own, so plain torch runs it in as many parts as there
            are ranks with different data.
        tolerance: how far weights may be from plain torch's, relative to the largest one of a tensor.
        settings: further arguments of the Trainer.
    """

    name: str
    row: str
    moments: tuple[str, ...]
    edit: Edit | None = None
    build: Callable[[Any], None] | None = None
    loss: Callable[[Any, Tensor], Any] | None = None
    step: Callable[[Any, Tensor], None] | None = None
    optimizer: Callable[[Any], Any] | None = None
    by_part: bool = False
    tolerance: float = 2e-5
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """The result on one rank: values that the action returned, metrics, and the weights if it holds all of them."""

    seen: list[float]
    metrics: dict[str, float]
    weights: dict[str, Tensor] | None


class Program(LanguageModel):
    """A small transformer that does an action at a moment."""

    action: ClassVar[Action]
    moment: ClassVar[str]

    def __init__(self) -> None:
        super().__init__(blocks=BLOCKS, lr=0.1)
        self.seen: list[float] = []
        self.skipped: set[int] = set()
        self.run_block: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)
        self.rows = torch.empty(0)
        self.values: dict[str, Any] = {}
        self.last = torch.empty(0)
        with torch.random.fork_rng():
            torch.manual_seed(11)
            if self.action.build is not None:
                self.action.build(self)
        self.act("__init__", None)

    def act(self, moment: str, trainer: Any) -> None:
        """Do the action if it is the moment, and note what it returns."""
        if self.action.edit is not None and moment in self.moment.split("+"):
            value = self.action.edit(self, trainer, moment)
            if value is not None:
                values = value if isinstance(value, list | tuple) else [value]
                self.seen += [each.item() if isinstance(each, Tensor) else float(each) for each in values]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.from_embeddings(self.embed(tokens))

    def from_embeddings(self, x: Tensor) -> Tensor:
        """Return logits for the embeddings of tokens."""
        logits: Tensor = self.head(self.hidden(x))
        return logits

    def hidden(self, x: Tensor) -> Tensor:
        """Return the last hidden states for the embeddings of tokens, and keep them in ``last``."""
        x = x + self.positions(self.order[: x.shape[1]])
        for index, block in enumerate(self.blocks):
            if index not in self.skipped:
                x = self.run_block(block, x)
        normed: Tensor = self.norm(x)
        if self.action.loss is not None:
            # Not always: a module with results of a graph cannot be copied.
            self.last = normed
        return normed

    def step_loss(self, rows: Tensor) -> Tensor:
        """Return the loss of rows, as the action computes it."""
        loss: Tensor = (type(self).loss if self.action.loss is None else self.action.loss)(self, rows)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows = batch[0]
        self.act("training_step", self.trainer)
        if self.automatic_optimization:
            return self.step_loss(batch[0])
        if self.action.step is not None:
            self.action.step(self, batch[0])
            return None
        optimizer = self.optimizers()
        loss = self.step_loss(batch[0])
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.act("manual", self.trainer)
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.rows = batch[0]
        self.act("validation_step", self.trainer)
        self.log("val_loss", self.loss(batch[0]))

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters()) if self.action.optimizer is None else self.action.optimizer(self)

    def over_ranks(self, how: str, function: Callable[[Tensor], Tensor]) -> Any:
        """Return a function's values of the rows of all ranks: ``gather`` for each of them, ``mean`` for their mean."""
        value = function(self.rows)
        if how == "mean":
            return self.fabric.all_reduce(value, "mean")
        return self.all_gather(value, sync_grads=value.requires_grad)


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    """Return SGD with momentum and decay, by which a step depends on those before, as it does with most optimizers."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.01)


def program(action: Action, moment: str, base: type[Program] = Program) -> Any:
    """Return the module of an action at a moment. It overrides the hook of the moment, and no other."""
    members: dict[str, Any] = {"action": action, "moment": moment}
    for hook in moment.split("+"):
        if hook not in ("__init__", "training_step", "validation_step") and hasattr(TrainModule, hook):
            members[hook] = _method(hook)
    if moment == "manual" or action.step is not None:
        members["automatic_optimization"] = False
    made: type[Program] = type("Program", (base,), members)
    return made()


def callback_of(moment: str) -> list[Callback]:
    """Return the callback that does the action, where the moment is one of a callback."""
    hooks = [hook.removeprefix(_CALLBACK) for hook in moment.split("+") if hook.startswith(_CALLBACK)]
    members: dict[str, Any] = {hook: _callback_method(hook) for hook in hooks}
    return [type("Acts", (Callback,), members)()] if hooks else []


def _method(hook: str) -> Callable[..., None]:
    return lambda self, *_: self.act(hook, self.trainer)


def _callback_method(hook: str) -> Callable[..., None]:
    return lambda self, trainer, module, *_: module.act(_CALLBACK + hook, trainer)


# ---- with a Trainer or a Fabric --------------------------------------------------------------------------------------


def fit(action: Action, moment: str, strategy: Any, ranks: int, parallel: str | None, folder: str) -> Outcome:
    """Train through a Trainer. Runs on each rank."""
    module = program(action, moment)
    trainer = silent_trainer(
        strategy=strategy,
        devices=ranks,
        parallel=parallel,
        max_epochs=EPOCHS,
        callbacks=callback_of(moment),
        num_sanity_val_steps=0,
        verbose=False,
        default_root_dir=folder,
        **action.settings,
    )
    share = GLOBAL_BATCH // trainer.fabric.resources.data_size
    validation = token_loader(GLOBAL_BATCH, share) if "validation" in moment else None
    trainer.fit(module, token_loader(ROWS, share), validation)
    module.act("after fit", trainer)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Outcome(module.seen, metrics, weights_of(module))


def fabric_loop(action: Action, moment: str, strategy: Any, ranks: int, parallel: str | None, folder: str) -> Outcome:
    """Train through a Fabric. Runs on each rank."""
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=ranks, parallel=parallel)
    fabric.launch()
    share = GLOBAL_BATCH // fabric.resources.data_size
    module = program(action, moment)
    optimizer = module.configure_optimizers()
    wrapped, optimizer = fabric.setup(module, optimizer)
    loader = fabric.setup_dataloaders(token_loader(ROWS, share))
    for _ in range(EPOCHS):
        for batch in loader:
            loss = wrapped.step_loss(batch[0])
            optimizer.zero_grad()
            fabric.backward(loss)
            module.act("fabric.backward", SimpleNamespace(optimizers=[optimizer]))
            optimizer.step()
            module.act("fabric.step", SimpleNamespace(optimizers=[optimizer]))
    # Empty on all ranks but the first under a strategy that shards.
    return Outcome(module.seen, {}, fabric.full_state_dict(wrapped) or None)


def run(action: Action, moment: str, *arguments: Any) -> Outcome:
    """Train as the moment asks for. Runs on each rank."""
    return (fabric_loop if moment.startswith(_FABRIC) else fit)(action, moment, *arguments)


def weights_of(module: nn.Module) -> dict[str, Tensor] | None:
    """Return copies of parameters and buffers by name; None on a rank that has not all of them."""
    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    return None if any(tensor.is_meta for tensor in state.values()) else {k: v.clone() for k, v in state.items()}
