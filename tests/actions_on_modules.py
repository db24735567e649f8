"""Actions of the table of semantics on modules: dtypes, kinds of parameters, layers added, replaced, copied, frozen."""

from __future__ import annotations

import copy
from typing import Any

import torch
from semantic_program import Action
from torch import Tensor, nn

from phalanx import TrainModule

DTYPES, MODULES = "dtypes and kinds of parameters", "change modules"
STEP = ("training_step",)
BUILDING = ("setup", "configure_model")
# In bfloat16 a difference in the last bit is 4e-3.
COARSE = 2e-2


def built(name: str, build: Any, loss: Any = None, **more: Any) -> Action:
    """Return an action that is a part of the module."""
    return Action(name, DTYPES, STEP, build=build, loss=loss, **more)


def changes(name: str, edit: Any, moments: tuple[str, ...] = BUILDING, **more: Any) -> Action:
    """Return an action that changes modules."""
    return Action(name, MODULES, moments, lambda module, trainer, moment: edit(module), **more)


# ---- dtypes ----------------------------------------------------------------------------------------------------------


class Half(nn.Linear):
    """A layer with weights in bfloat16 among others in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def half_layers(module: Any) -> None:
    for block in module.blocks:
        block.widen = Half(32, 128, dtype=torch.bfloat16)


def half_head(module: Any) -> None:
    module.extra = Half(32, 8, dtype=torch.bfloat16)


def double_head(module: Any) -> None:
    module.extra = Half(32, 8, dtype=torch.float64)


def frozen_half(module: Any) -> None:
    module.extra = Half(32, 8, dtype=torch.float16).requires_grad_(False)


def with_extra(module: Any, rows: Tensor) -> Any:
    return module.loss(rows) + 0.1 * module.extra(module.last).square().mean()


def complex_parameter(module: Any) -> None:
    module.phase = nn.Parameter(torch.polar(torch.full((32,), 0.1), torch.arange(32.0)))


def with_phase(module: Any, rows: Tensor) -> Any:
    loss = module.loss(rows)
    return loss + 0.1 * (module.last * module.phase - 0.1).abs().square().mean()


def scalar_parameter(module: Any) -> None:
    module.scale = nn.Parameter(torch.tensor(1.5))


def with_scale(module: Any, rows: Tensor) -> Any:
    logits = module.scale * module(rows)[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def scalars_in_blocks(module: Any) -> None:
    for block in module.blocks:
        block.gain = nn.Parameter(torch.tensor(0.9))
        block.register_forward_hook(lambda block, inputs, output: block.gain * output)


def single_element(module: Any) -> None:
    module.scale = nn.Parameter(torch.full((1,), 1.5))


def empty_parameter(module: Any) -> None:
    module.none = nn.Parameter(torch.empty(0, 32))


def transposed_parameter(module: Any) -> None:
    module.blocks[1].project.weight = nn.Parameter(module.blocks[1].project.weight.detach().T.contiguous().T)


def integer_buffer(module: Any) -> None:
    module.register_buffer("order_of_units", torch.arange(31, -1, -1))


def with_order(module: Any, rows: Tensor) -> Any:
    loss, hidden = module.loss(rows), module.last
    return loss + 0.1 * (hidden * hidden[..., module.order_of_units]).mean()


def frozen_block(module: Any) -> None:
    module.blocks[0].requires_grad_(False)


def parameter_list(module: Any) -> None:
    module.offsets = nn.ParameterList([torch.full((32,), 0.1), torch.full((32,), -0.1)])


def with_offsets(module: Any, rows: Tensor) -> Any:
    return module.loss(rows) + 0.1 * ((module.last + module.offsets[0]) * module.offsets[1]).mean()


# ---- modules ---------------------------------------------------------------------------------------------------------


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
    built("bf16 layers in fp32 blocks", half_layers, tolerance=COARSE),
    built("a bf16 layer beside", half_head, with_extra, tolerance=COARSE),
    built("a float64 layer beside", double_head, with_extra),
    built("a frozen fp16 layer", frozen_half, with_extra),
    built("a complex parameter", complex_parameter, with_phase),
    built("a 0-d parameter", scalar_parameter, with_scale),
    built("0-d parameters in blocks", scalars_in_blocks),
    built("a parameter with one element", single_element, with_scale),
    built("a parameter without elements", empty_parameter),
    built("a parameter that is not contiguous", transposed_parameter),
    built("an integer buffer", integer_buffer, with_order),
    built("a frozen block", frozen_block),
    built("`ParameterList`", parameter_list, with_offsets),
    Action("`TrainModule` inside another", MODULES, STEP, build=add_child, loss=with_child),
    changes("lazy layer", initialize_lazy, build=add_lazy, loss=with_extra),
    changes("layer added", add_layer, (*BUILDING, "on_fit_start", "on_train_epoch_start"), loss=with_extra_if_there),
    Action(
        "layer added with its parameter group",
        MODULES,
        ("on_fit_start", "on_train_epoch_start", "on_train_epoch_end"),
        add_layer_and_train_it,
        loss=with_extra_if_there,
    ),
    changes("layer replaced", replace_layer, (*BUILDING, "on_fit_start")),
    changes("`nn.Parameter` replaced", replace_parameter, (*BUILDING, "on_fit_start", "on_train_epoch_start")),
    changes("embedding resized", resize_embedding, loss=loss_of_larger),
    changes("block replaced by `nn.Identity`", remove_block, (*BUILDING, "on_fit_start")),
    changes("reference copied", copy_reference, (*BUILDING, "on_fit_start"), loss=with_reference),
    changes("reference copied into the module", add_reference, (*BUILDING, "on_fit_start"), loss=with_reference),
    changes("block frozen", freeze, (*BUILDING, "on_fit_start", "on_train_epoch_start", "on_train_epoch_end")),
    changes("block unfrozen later", freeze_and_unfreeze, ("on_train_epoch_start", "callback.on_train_epoch_start")),
    changes("a block in `eval()`", evaluate_block, ("on_train_epoch_start", "on_train_batch_start"), loss=with_mode),
    changes("`deepcopy` of the module", copy_whole, ("on_train_batch_end", "callback.on_train_epoch_end")),
    changes("a forward pass in a hook", call_without_gradient, EVALUATED),
    changes("names of parameters", names_of_parameters, ("training_step", "on_after_backward", "on_train_batch_end")),
    changes("parameters as keys", known_by_identity, STEP, build=keep_by_identity),
]
