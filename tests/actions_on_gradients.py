"""Actions of the table of semantics that read and write gradients, and set hooks."""

from __future__ import annotations

from typing import Any

import torch
from semantic_program import Action
from torch import Tensor, nn

GRADIENTS, HOOKS = "reading or changing a gradient", "registering a hook"
WITH_GRADIENTS = (
    *("on_after_backward", "on_before_optimizer_step", "manual", "fabric.backward"),
    *("callback.on_after_backward", "callback.on_before_optimizer_step"),
)
TWO = ("on_before_optimizer_step", "manual")
THREE = ("on_after_backward", *TWO)
EARLY = ("__init__", "configure_model", "setup", "on_fit_start")


def edits(name: str, edit: Any, moments: tuple[str, ...] = WITH_GRADIENTS) -> Action:
    """Return an action that changes gradients, or returns numbers of them."""
    return Action(name, GRADIENTS, moments, lambda module, trainer, moment: edit(module))


def norms(module: Any) -> list[float]:
    return [float(w.grad.norm()) for w in (module.embed.weight, module.blocks[1].widen.weight, module.norm.bias)]


def total_norm(module: Any) -> Tensor:
    return nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])


def cosine(module: Any) -> float:
    first, second = (block.query.weight.grad.flatten() for block in module.blocks[:2])
    return float(nn.functional.cosine_similarity(first, second, dim=0))


def zero_block(module: Any) -> None:
    for parameter in module.blocks[1].parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def scale_block(module: Any) -> None:
    for parameter in module.blocks[0].parameters():
        parameter.grad.mul_(0.1)


def scale_all(module: Any) -> None:
    torch._foreach_mul_([parameter.grad for parameter in module.parameters()], 0.5)


def freeze_rows(module: Any) -> None:
    module.embed.weight.grad[:4] = 0.0


def drop_block(module: Any) -> None:
    for parameter in module.blocks[2].parameters():
        parameter.grad = None


def add_noise(module: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad += 0.01 * torch.randn(parameter.shape, generator=generator)


def take_signs(module: Any) -> None:
    for parameter in module.blocks[1].parameters():
        parameter.grad = 0.01 * parameter.grad.clamp(-1e-3, 1e-3)


def project(module: Any) -> None:
    first, second = (block.narrow.weight.grad for block in module.blocks[:2])
    first.sub_(second, alpha=float((first * second).sum() / second.square().sum()))


def add_decay(module: Any) -> None:
    for parameter in module.blocks.parameters():
        parameter.grad.add_(parameter.detach(), alpha=0.1)


def assign(module: Any) -> None:
    weight = module.blocks[1].project.weight
    weight.grad = torch.full_like(weight, 0.01)


def mask_rows(gradient: Tensor) -> Tensor:
    keep = torch.ones_like(gradient)
    keep[:4] = 0.0
    return gradient * keep


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def hooked(name: str, edit: Any, moments: tuple[str, ...] = EARLY, **more: Any) -> Action:
    """Return an action that sets a hook."""
    return Action(name, HOOKS, moments, lambda module, trainer, moment: edit(module), **more)


def mask_by_hook(module: Any) -> None:
    module.embed.weight.register_hook(mask_rows)


def scale_by_hook(module: Any) -> None:
    for parameter in module.blocks[1].parameters():
        parameter.register_hook(lambda gradient: 0.1 * gradient)


def halve_when_accumulated(module: Any) -> None:
    for parameter in module.blocks[1].parameters():
        parameter.register_post_accumulate_grad_hook(halve)


def change_output(module: Any) -> None:
    module.blocks[1].register_forward_hook(lambda block, inputs, output: 0.5 * output)


def change_input(module: Any) -> None:
    module.blocks[1].register_forward_pre_hook(lambda block, inputs: (0.5 * inputs[0],))


def change_gradient_of_input(module: Any) -> None:
    module.blocks[1].register_full_backward_hook(lambda block, inner, outer: (0.5 * inner[0],))


def scale_in_hook(module: Any) -> None:
    def scale(block: Any, inputs: Any) -> None:
        with torch.no_grad():
            block.narrow.bias.mul_(0.9)

    module.blocks[1].register_forward_pre_hook(scale)


def rename_in_state(module: Any) -> None:
    def count(part: Any, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        state[f"{prefix}scale.weight"] = 2 * state[f"{prefix}norm_mlp.weight"]

    module.blocks[1].register_state_dict_post_hook(count)


def keep_output(module: Any) -> None:
    def keep(block: Any, inputs: Any, output: Tensor) -> None:
        module.values["kept"] = output

    module.blocks[1].register_forward_hook(keep)


def loss_of_kept(module: Any, rows: Tensor) -> Any:
    loss = module.loss(rows)
    return loss + 0.1 * module.values["kept"].square().mean()


ACTIONS = [
    edits("`float(p.grad.norm())`", norms),
    edits("`get_total_norm` of all gradients", total_norm, TWO),
    edits("cosine similarity of two gradients", cosine, TWO),
    edits("`p.grad.zero_()` of a block", zero_block),
    edits("`p.grad.mul_()` of a block", scale_block, THREE),
    edits("`_foreach_mul_` of all gradients", scale_all, TWO),
    edits("rows of `p.grad` set to zero", freeze_rows, TWO),
    edits("`p.grad = None` of a block", drop_block, THREE),
    edits("random noise added to gradients", add_noise, TWO),
    edits("`p.grad = f(p.grad)`", take_signs, THREE),
    edits("`p.grad = tensor`", assign, TWO),
    edits("projection of a gradient (gradient surgery)", project, TWO),
    edits("weight decay added to gradients", add_decay, TWO),
    edits("`clip_grad_norm_` of all gradients", lambda m: float(nn.utils.clip_grad_norm_(m.parameters(), 0.1))),
    edits("`clip_grad_norm_` of a block", lambda m: float(nn.utils.clip_grad_norm_(m.blocks[1].parameters(), 0.01))),
    edits("`clip_grad_value_` of all gradients", lambda m: nn.utils.clip_grad_value_(m.parameters(), 1e-3)),
    hooked("`p.register_hook` that masks rows", mask_by_hook),
    hooked("`p.register_hook` that scales the gradient", scale_by_hook, ("__init__", "on_fit_start")),
    hooked("`register_post_accumulate_grad_hook`", halve_when_accumulated),
    hooked("forward hook that changes the output", change_output, EARLY[::3]),
    hooked("forward pre-hook that changes the input", change_input, ("__init__", "on_fit_start")),
    hooked("forward hook that stores the output", keep_output, EARLY[::3], loss=loss_of_kept),
    hooked("full backward hook that scales the gradient", change_gradient_of_input, EARLY[::3]),
    hooked("forward pre-hook that changes a weight", scale_in_hook, ("__init__", "on_fit_start")),
    hooked("state dict hook that adds an entry", rename_in_state, ("__init__", "on_fit_start")),
]
