"""Actions of the table of semantics on modules: layers are added, replaced, copied and frozen."""

from __future__ import annotations

import copy
from typing import Any

import torch
from semantic_program import Action
from torch import Tensor, nn

from phalanx import TrainModule

MODULES = "changing modules"
STEP = ("training_step",)
BUILDING = ("setup", "configure_model")


def with_extra(module: Any, rows: Tensor) -> Any:
    return module.loss(rows) + 0.1 * module.extra(module.last).square().mean()


def changes(name: str, edit: Any, moments: tuple[str, ...] = BUILDING, **more: Any) -> Action:
    """Return an action that changes modules."""
    return Action(name, MODULES, moments, lambda module, trainer, moment: edit(module), **more)


class Child(TrainModule):
    """A Train module inside of another, which logs on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.log("child", 1.5, on_step=False, on_epoch=True)
        output: Tensor = (1 + self.current_epoch) * self.net(x)
        return output


def add_child(module: Any) -> None:
    module.child = Child()


def with_child(module: Any, rows: Tensor) -> Any:
    loss = module.loss(rows)
    if module.trainer is not None and not hasattr(module.trainer, "fit"):
        # Plain torch has no Trainer that the child belongs to.
        module.log("child", 1.5)
        output = (1 + module.current_epoch) * module.child.net(module.last)
    else:
        output = module.child(module.last)
    return loss + 0.1 * output.square().mean()


def add_lazy(module: Any) -> None:
    module.extra = nn.LazyLinear(8)


def initialize_lazy(module: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        module.extra(torch.zeros(1, 32))


def seeded(inputs: int, outputs: int) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Linear(inputs, outputs)


def add_layer(module: Any) -> None:
    if not hasattr(module, "extra"):
        module.extra = seeded(32, 8)


def with_extra_if_there(module: Any, rows: Tensor) -> Any:
    loss = module.loss(rows)
    return with_extra(module, rows) if hasattr(module, "extra") else loss


def add_layer_and_train_it(module: Any, trainer: Any, moment: str) -> None:
    if not hasattr(module, "extra"):
        module.extra = seeded(32, 8)
        trainer.optimizers[0].add_param_group({"params": list(module.extra.parameters())})


def replace_layer(module: Any) -> None:
    module.blocks[1].project = seeded(32, 32)


def replace_parameter(module: Any) -> None:
    module.norm.weight = nn.Parameter(0.5 * module.norm.weight.detach())


def resize_embedding(module: Any) -> None:
    larger = nn.Embedding(60, 32)
    with torch.no_grad():
        larger.weight.zero_()
        larger.weight[:53] = module.embed.weight
    module.embed = larger
    module.head.weight = larger.weight


def loss_of_larger(module: Any, rows: Tensor) -> Any:
    logits = module(rows)[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def remove_block(module: Any) -> None:
    module.blocks[2] = nn.Identity()


def copy_reference(module: Any) -> None:
    # Not a child: its weights are in no checkpoint.
    module.values["reference"] = copy.deepcopy(module.blocks).requires_grad_(False).eval()


def add_reference(module: Any) -> None:
    module.reference = copy.deepcopy(module.blocks).requires_grad_(False).eval()


def with_reference(module: Any, rows: Tensor) -> Any:
    loss = module.loss(rows)
    target = module.embed(rows).detach()
    with torch.no_grad():
        for block in module.values.get("reference") or module.reference:
            target = block(target)
    return loss + 0.1 * (module.last - target).square().mean()


def freeze(module: Any) -> None:
    module.blocks[0].requires_grad_(False)


def freeze_and_unfreeze(module: Any) -> None:
    module.blocks[0].requires_grad_(module.current_epoch > 0)


def evaluate_block(module: Any) -> None:
    module.blocks[1].eval()


def with_mode(module: Any, rows: Tensor) -> Any:
    loss = module.loss(rows)
    return loss if module.blocks[1].training else 0.5 * loss


def copy_whole(module: Any) -> float:
    with torch.no_grad():
        return float(copy.deepcopy(module)(torch.arange(12).view(1, 12)).norm())


def call_without_gradient(module: Any) -> float:
    with torch.no_grad():
        return float(module(torch.arange(12).view(1, 12)).norm())


def names_of_parameters(module: Any) -> list[float]:
    names = [name for name, _ in module.named_parameters()]
    return [len(names), sum(len(name) for name in names), sum(p.requires_grad for p in module.parameters())]


def keep_by_identity(module: Any) -> None:
    module.values["names"] = {parameter: name for name, parameter in module.named_parameters()}


def known_by_identity(module: Any) -> float:
    return sum(parameter in module.values["names"] for parameter in module.parameters())


EVALUATED = ("on_train_batch_end", "callback.on_train_epoch_end", "on_train_epoch_start")
ACTIONS = [
    Action("`TrainModule` inside another `TrainModule`", MODULES, STEP, build=add_child, loss=with_child),
    changes("lazy layer initialized", initialize_lazy, build=add_lazy, loss=with_extra),
    changes("layer added", add_layer, (*BUILDING, "on_fit_start", "on_train_epoch_start"), loss=with_extra_if_there),
    Action(
        "layer added with a parameter group",
        MODULES,
        ("on_fit_start", "on_train_epoch_start", "on_train_epoch_end"),
        add_layer_and_train_it,
        loss=with_extra_if_there,
    ),
    changes("layer replaced", replace_layer, (*BUILDING, "on_fit_start")),
    changes("`nn.Parameter` replaced", replace_parameter, (*BUILDING, "on_fit_start", "on_train_epoch_start")),
    changes("embedding resized", resize_embedding, loss=loss_of_larger),
    changes("block replaced by `nn.Identity`", remove_block, (*BUILDING, "on_fit_start")),
    changes(
        "reference copy of the blocks outside the module",
        copy_reference,
        (*BUILDING, "on_fit_start"),
        loss=with_reference,
    ),
    changes(
        "reference copy of the blocks in the module", add_reference, (*BUILDING, "on_fit_start"), loss=with_reference
    ),
    changes("block frozen", freeze, (*BUILDING, "on_fit_start", "on_train_epoch_start", "on_train_epoch_end")),
    changes(
        "block unfrozen after an epoch", freeze_and_unfreeze, ("on_train_epoch_start", "callback.on_train_epoch_start")
    ),
    changes(
        "block set to evaluation mode", evaluate_block, ("on_train_epoch_start", "on_train_batch_start"), loss=with_mode
    ),
    changes("`deepcopy` of the module", copy_whole, ("on_train_batch_end", "callback.on_train_epoch_end")),
    changes("forward pass in a hook", call_without_gradient, EVALUATED),
    changes(
        "names of parameters read", names_of_parameters, ("training_step", "on_after_backward", "on_train_batch_end")
    ),
    changes("parameters used as dict keys", known_by_identity, STEP, build=keep_by_identity),
]
