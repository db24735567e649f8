"""Actions of the table of semantics that read and write weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from semantic_program import Action
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

READS, WRITES = "reading a weight", "writing a weight"
SET_UP = ("configure_model", "setup", "on_fit_start")
STEP = ("training_step", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end")
LATE = ("on_train_epoch_end", "after fit", "callback.on_train_batch_end", "callback.on_validation_epoch_end")
EVERYWHERE = (*SET_UP, "on_train_epoch_start", *STEP, *LATE, "validation_step", "fabric.step")
SOME = ("training_step", "callback.on_train_batch_end", "on_fit_start")
WHEN_WRITTEN = (
    *(*SET_UP, "on_train_start", "on_train_epoch_start", "on_train_batch_start", *STEP),
    *("manual", "on_train_epoch_end", "on_validation_epoch_start", "callback.on_train_batch_start"),
    *("callback.on_before_optimizer_step", "callback.on_train_batch_end", "fabric.backward", "fabric.step"),
)
BETWEEN = ("on_train_batch_end", "on_fit_start", "training_step", "callback.on_train_epoch_end")


def some_of(module: Any) -> tuple[Tensor, ...]:
    """Return a tied weight, one of a block, and a vector."""
    return module.embed.weight, module.blocks[1].widen.weight, module.norm.weight


def reads(name: str, function: Callable[[Any], Any], moments: tuple[str, ...] = SOME) -> Action:
    """Return an action that computes numbers of a module."""
    return Action(name, READS, moments, lambda module, trainer, moment: function(module))


def writes(name: str, edit: Callable[[Any], None], moments: tuple[str, ...] = BETWEEN, **more: Any) -> Action:
    """Return an action that changes a module in place, outside of autograd."""

    @torch.no_grad()
    def quietly(module: Any, trainer: Any, moment: str) -> None:
        edit(module)

    return Action(name, WRITES, moments, quietly, **more)


def log_norm(module: Any, trainer: Any, moment: str) -> None:
    module.log("norm", module.blocks[1].widen.weight.norm(), on_step=False, on_epoch=True)


def distance_from_start(module: Any) -> list[float]:
    weights = some_of(module)
    start = module.values.setdefault("start", [weight.detach().clone() for weight in weights])
    return [float((weight.detach() - first).norm()) for weight, first in zip(weights, start, strict=True)]


def copied_block(module: Any) -> float:
    block = copy.deepcopy(module.blocks[1])
    with torch.no_grad():
        return float(block(torch.linspace(-1, 1, 64).view(1, 2, 32)).norm())


def clamp(module: Any) -> None:
    for parameter in module.parameters():
        parameter.clamp_(-0.1, 0.1)


def shrink_block(module: Any) -> None:
    for parameter in module.blocks[1].parameters():
        parameter.mul_(0.9)


def assign_data(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data = 0.9 * parameter.data


def copy_layer(module: Any) -> None:
    module.blocks[2].widen.weight.copy_(module.blocks[0].widen.weight)


def load_block(module: Any) -> None:
    module.blocks[2].load_state_dict(module.blocks[0].state_dict())


def load_all(module: Any) -> None:
    state = {name: 0.9 * tensor for name, tensor in module.state_dict().items()}
    module.load_state_dict(state)


def initialize(module: Any) -> None:
    nn.init.eye_(module.blocks[1].project.weight)
    nn.init.zeros_(module.blocks[1].project.bias)


def initialize_at_random(module: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    nn.init.normal_(module.blocks[1].project.weight, std=0.1, generator=generator)


def add_noise(module: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in module.blocks.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)


def zero_rows(module: Any) -> None:
    module.embed.weight[:3] = 0.0


def normalize_rows(module: Any) -> None:
    for block in module.blocks:
        block.narrow.weight.div_(block.narrow.weight.norm(dim=1, keepdim=True))


def through_vector(module: Any) -> None:
    vector_to_parameters(0.9 * parameters_to_vector(module.blocks.parameters()), module.blocks.parameters())


def shrink_all_at_once(module: Any) -> None:
    torch._foreach_mul_(list(module.parameters()), 0.9)


def mask_weights(module: Any) -> None:
    for block in module.blocks:
        block.widen.weight.mul_(block.widen.weight.abs() > 0.05)


def write_through_data(module: Any) -> None:
    module.blocks[0].query.weight.data.mul_(0.5)
    module.embed.weight.data[3:5].zero_()


def apply_to_modules(module: Any) -> None:
    def halve(part: nn.Module) -> None:
        if isinstance(part, nn.Linear) and part.bias is not None:
            part.bias.data.fill_(0.01)

    module.apply(halve)


def add_teacher(module: Any) -> None:
    module.teacher = copy.deepcopy(module.blocks).requires_grad_(False)


def move_teacher(module: Any) -> None:
    for old, new in zip(module.teacher.parameters(), module.blocks.parameters(), strict=True):
        old.mul_(0.5).add_(new, alpha=0.5)


def assign_teacher(module: Any) -> None:
    for old, new in zip(module.teacher.parameters(), module.blocks.parameters(), strict=True):
        old.data = 0.5 * old.data + 0.5 * new.data


def loss_to_teacher(module: Any, rows: Tensor) -> Any:
    loss = module.loss(rows)
    target = module.embed(rows).detach()
    with torch.no_grad():
        for block in module.teacher:
            target = block(target)
    return loss + 0.1 * (module.last - target).square().mean()


def swap(module: Any, trainer: Any, moment: str) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if moment.endswith("start"):
                module.values[parameter] = parameter.detach().clone()
                parameter.mul_(0.5)
            else:
                parameter.copy_(module.values.pop(parameter))


def count_steps(module: Any) -> None:
    module.steps.add_(1)
    module.running.lerp_(torch.full((32,), float(module.steps)), 0.5)


def add_counts(module: Any) -> None:
    module.register_buffer("steps", torch.zeros((), dtype=torch.long))
    module.register_buffer("running", torch.zeros(32))


def loss_with_counts(module: Any, rows: Tensor) -> Any:
    return module.loss(rows) + 0.1 * (module.last * module.running).mean()


def add_max_norm(module: Any) -> None:
    module.positions.max_norm = 0.5


def add_pruning(module: Any) -> None:
    prune.l1_unstructured(module.blocks[1].widen, "weight", amount=0.5)


def add_weight_norm(module: Any) -> None:
    nn.utils.parametrizations.weight_norm(module.blocks[1].widen)


def add_spectral_norm(module: Any) -> None:
    nn.utils.parametrizations.spectral_norm(module.blocks[1].narrow)


ACTIONS = [
    reads("`float(w.detach().norm())`", lambda m: [float(w.detach().norm()) for w in some_of(m)], EVERYWHERE),
    reads("`w.abs().mean().item()`", lambda m: [w.abs().mean().item() for w in some_of(m)]),
    reads("`w.data.sum()`", lambda m: [float(w.data.sum()) for w in some_of(m)]),
    reads("one element of a weight", lambda m: [w.flatten()[5].item() for w in some_of(m)]),
    reads("`p.numel()` and `p.shape`", lambda m: [sum(p.numel() for p in m.parameters()), *some_of(m)[1].shape]),
    reads("`parameters_to_vector`", lambda m: parameters_to_vector(m.parameters()).detach().norm()),
    reads(
        "norms of the tensors in `state_dict()`",
        lambda m: [v.float().norm() for v in m.state_dict().values()],
        (*SOME, *LATE),
    ),
    reads("`w.detach().numpy()`", lambda m: [w.detach().numpy().std() for w in some_of(m)]),
    reads("largest elements (`topk`)", lambda m: m.embed.weight.detach().flatten().topk(3).values.sum()),
    reads("spectral norm of a weight", lambda m: torch.linalg.matrix_norm(m.blocks[1].widen.weight.detach(), 2)),
    reads("product of two weights", lambda m: (m.blocks[0].query.weight @ m.blocks[0].key.weight.T).trace()),
    reads("distance from the initial weights", distance_from_start, ("on_fit_start+on_train_batch_end", *SOME[:2])),
    reads("`deepcopy` of a block", copied_block),
    Action("`self.log(w.norm())`", READS, ("training_step", "on_train_batch_end", "on_after_backward"), log_norm),
    writes("`clamp_` of all weights", clamp, WHEN_WRITTEN),
    writes("`mul_` of a block", shrink_block, WHEN_WRITTEN),
    writes("`p.data = ...`", assign_data, WHEN_WRITTEN),
    writes("`copy_` between layers", copy_layer),
    writes("`load_state_dict` of a block", load_block, ("configure_model", *BETWEEN)),
    writes("`load_state_dict` of the module", load_all),
    writes("`nn.init`", initialize, ("configure_model", *BETWEEN)),
    writes("`nn.init` with a generator", initialize_at_random),
    writes("random noise added to weights", add_noise),
    writes("rows of a weight set to zero", zero_rows),
    writes("rows of a weight normalized", normalize_rows),
    writes("`vector_to_parameters`", through_vector),
    writes("`torch._foreach_mul_` of all weights", shrink_all_at_once),
    writes("weights multiplied by a mask", mask_weights),
    writes("`p.data.mul_()` and `p.data[i].zero_()`", write_through_data),
    writes("`module.apply`", apply_to_modules),
    writes("moving average of a teacher, in place", move_teacher, build=add_teacher, loss=loss_to_teacher),
    writes("moving average of a teacher, with `p.data = ...`", assign_teacher, build=add_teacher, loss=loss_to_teacher),
    Action(
        "weights replaced during validation",
        WRITES,
        (
            "on_validation_start+on_validation_end",
            "callback.on_validation_epoch_start+callback.on_validation_epoch_end",
        ),
        swap,
    ),
    writes("buffers updated at each step", count_steps, build=add_counts, loss=loss_with_counts),
    Action("`Embedding(max_norm)`", WRITES, ("training_step",), build=add_max_norm),
    Action("`prune.l1_unstructured`", WRITES, ("training_step",), build=add_pruning),
    Action("`weight_norm`", WRITES, ("training_step",), build=add_weight_norm),
    Action("`spectral_norm`", WRITES, ("training_step",), build=add_spectral_norm),
]
