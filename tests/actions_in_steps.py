"""Actions of the table of semantics that a training step does: penalties, layers left out, derivatives, collectives."""

from __future__ import annotations

import copy
from typing import Any

import torch
from semantic_program import Action
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

OUTSIDE, LEFT_OUT, DERIVATIVES = "using a parameter outside its layer", "skipping a layer", "computing derivatives"
COLLECTIVES = "calling collectives"
EXTRA = 8


def stepping(name: str, row: str, loss: Any, **more: Any) -> Action:
    """Return an action that computes the loss of a step."""
    return Action(name, row, ("training_step",), loss=loss, **more)


def is_odd(rows: Tensor) -> bool:
    """Whether the rows of a part are of the one of two kinds."""
    return bool(rows[0].sum() % 2)


# ---- parameters outside of their modules -----------------------------------------------------------------------------


def squares(module: Any, rows: Tensor) -> Any:
    return module.loss(rows) + 0.01 * sum(p.square().sum() for p in module.parameters())


def absolute_values(module: Any, rows: Tensor) -> Any:
    return module.loss(rows) + 0.01 * sum(p.abs().sum() for name, p in module.named_parameters() if "widen" in name)


def keep_parameters(module: Any) -> None:
    module.values["kept"] = list(module.parameters())


def squares_of_kept(module: Any, rows: Tensor) -> Any:
    return module.loss(rows) + 0.01 * sum(p.square().sum() for p in module.values["kept"])


def norm_of_all(module: Any, rows: Tensor) -> Any:
    return module.loss(rows) + 0.01 * torch.cat([p.flatten() for p in module.parameters()]).norm()


def orthogonality(module: Any, rows: Tensor) -> Any:
    weight = module.blocks[1].project.weight
    return module.loss(rows) + 0.01 * (weight @ weight.T - torch.eye(32)).square().sum()


def linear_of_another(module: Any, rows: Tensor) -> Any:
    loss = module.loss(rows)
    return loss + 0.1 * nn.functional.linear(module.last, module.blocks[0].query.weight).square().mean()


def product_with_embedding(module: Any, rows: Tensor) -> Any:
    return module.loss(rows) + 0.01 * (module.last @ module.embed.weight.T).logsumexp(-1).mean()


def distance_of_layers(module: Any, rows: Tensor) -> Any:
    first, second = module.blocks[0].widen.weight, module.blocks[2].widen.weight
    return module.loss(rows) + 0.01 * (first - second).square().sum()


def tie_layers(module: Any) -> None:
    module.blocks[2].widen.weight = module.blocks[0].widen.weight


def tie_blocks(module: Any) -> None:
    module.blocks[2] = module.blocks[0]


def own_parameter(module: Any) -> None:
    module.tokens_seen = nn.Parameter(torch.linspace(-0.1, 0.1, 32))


def with_own_parameter(module: Any, rows: Tensor) -> Any:
    return module.loss(rows) + 0.1 * (module.last * module.tokens_seen).mean()


def functional(module: Any, rows: Tensor) -> Any:
    block, x = module.blocks[1], module.embed(rows)
    shrunk = {name: 0.5 * parameter for name, parameter in block.named_parameters()}
    return module.loss(rows) + 0.1 * functional_call(block, shrunk, (x,)).square().mean()


def without_forward(module: Any, rows: Tensor) -> Any:
    logits = module.from_embeddings(module.embed(rows))[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


# ---- layers left out -------------------------------------------------------------------------------------------------


def skip_on_all(module: Any, rows: Tensor) -> Any:
    module.values["count"] = module.values.get("count", 0) + 1
    module.skipped = {module.values["count"] % 3}
    return module.loss(rows)


def skip_always(module: Any, rows: Tensor) -> Any:
    module.skipped = {1}
    return module.loss(rows)


def skip_on_some(module: Any, rows: Tensor) -> Any:
    module.skipped = {1} if is_odd(rows) else set()
    return module.loss(rows)


def skip_another(module: Any, rows: Tensor) -> Any:
    module.skipped = {1} if is_odd(rows) else {2}
    return module.loss(rows)


def equal_towers(module: Any) -> None:
    module.towers = nn.ModuleList([nn.Linear(32, EXTRA), nn.Linear(32, EXTRA)])


def unequal_towers(module: Any) -> None:
    module.towers = nn.ModuleList([nn.Linear(32, EXTRA), nn.Linear(32, 3 * EXTRA)])


def one_tower(module: Any, rows: Tensor) -> Any:
    tower = module.towers[int(is_odd(rows))]
    return module.loss(rows) + 0.1 * tower(module.last).square().mean()


def tower_in_turn(module: Any, rows: Tensor) -> Any:
    module.values["count"] = module.values.get("count", 0) + 1
    tower = module.towers[module.values["count"] % 2]
    return module.loss(rows) + 0.1 * tower(module.last).square().mean()


def tower_on_some(module: Any, rows: Tensor) -> Any:
    loss = module.loss(rows)
    return loss + 0.1 * module.towers[0](module.last).square().mean() if is_odd(rows) else loss


def unused(module: Any, rows: Tensor) -> Any:
    return module.loss(rows)


def detached(module: Any, rows: Tensor) -> Any:
    x = module.embed(rows).detach()
    logits = module.from_embeddings(x)[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


# ---- derivatives -----------------------------------------------------------------------------------------------------


def penalty_on_inputs(module: Any, rows: Tensor) -> Any:
    x = module.embed(rows).detach().requires_grad_()
    # Others have no second derivative.
    with sdpa_kernel(SDPBackend.MATH):
        (slope,) = torch.autograd.grad(module.from_embeddings(x).logsumexp(-1).sum(), x, create_graph=True)
    return module.loss(rows) + 0.1 * slope.square().sum((1, 2)).mean()


def penalty_on_weights(module: Any, rows: Tensor) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        loss = module.loss(rows)
    (slope,) = torch.autograd.grad(loss, module.blocks[1].widen.weight, create_graph=True)
    return loss + slope.square().sum()


def read_slope(module: Any, rows: Tensor) -> Any:
    x = module.embed(rows).detach().requires_grad_()
    (slope,) = torch.autograd.grad(module.hidden(x).sum(), x)
    return module.loss(rows) + 0.1 * (module.last * slope).mean()


def two_forwards(module: Any, rows: Tensor) -> Any:
    first, second = (module.hidden(module.embed(each)).mean(1) for each in (rows[:, :6], rows[:, 6:]))
    return module.loss(rows) + 0.1 * (first - second).square().mean()


def forward_without_gradient(module: Any, rows: Tensor) -> Any:
    with torch.no_grad():
        target = module(rows.flip(1))
    return module.loss(rows) + 0.1 * (module(rows) - target).square().mean()


def recompute(module: Any, rows: Tensor) -> Any:
    module.run_block = lambda block, x: checkpoint(block, x, use_reentrant=False)
    return module.loss(rows)


def recompute_reentrant(module: Any, rows: Tensor) -> Any:
    module.run_block = lambda block, x: checkpoint(block, x, use_reentrant=True)
    return module.loss(rows)


def block_twice(module: Any, rows: Tensor) -> Any:
    module.run_block = lambda block, x: block(block(x))
    return module.loss(rows)


def block_twice_reentrant(module: Any, rows: Tensor) -> Any:
    module.run_block = lambda block, x: checkpoint(lambda y: block(block(y)), x, use_reentrant=True)
    return module.loss(rows)


def self_distillation(module: Any, rows: Tensor) -> Any:
    earlier = copy.deepcopy(module.blocks[0].state_dict())
    with torch.no_grad():
        target = functional_call(module.blocks[0], earlier, (module.embed(rows),))
    return module.loss(rows) + 0.1 * (module.last - target).square().mean()


# ---- collectives -----------------------------------------------------------------------------------------------------


def gathered_features(module: Any, rows: Tensor) -> Any:
    found = module.over_ranks("gather", lambda part: module.hidden(module.embed(part)).mean((0, 1)))
    features = torch.stack(list(found)).view(-1, 32)
    return module.loss(rows) + 0.1 * features.mean(0).square().sum()


def gathered_numbers(module: Any, trainer: Any, moment: str) -> float:
    found = module.over_ranks("gather", lambda part: part.float().mean(0))
    return float(sum(each.sum() for each in found)) / len(found)


def gathered_unequal(module: Any, trainer: Any, moment: str) -> Tensor:
    found = module.over_ranks("gather", lambda part: part[: 1 + int(part.sum()) % 3].float().flatten())
    # Without padding, in whatever form: the mean over all elements.
    return torch.cat([each.flatten() for each in found]).mean()


def reduced(module: Any, trainer: Any, moment: str) -> float:
    return float(module.over_ranks("mean", lambda part: part.float().square().mean()))


def skipping(name: str, loss: Any, **more: Any) -> Action:
    """Return an action that leaves layers out."""
    return stepping(name, LEFT_OUT, loss, **more)


def derived(name: str, loss: Any, **more: Any) -> Action:
    """Return an action that differentiates in ways of its own."""
    return stepping(name, DERIVATIVES, loss, **more)


WITH_ROWS = ("training_step", "on_train_batch_end", "validation_step")
ACTIONS = [
    stepping("penalty on all `parameters()`", OUTSIDE, squares),
    stepping("penalty on some parameters", OUTSIDE, absolute_values),
    stepping("penalty on parameters stored in `__init__`", OUTSIDE, squares_of_kept, build=keep_parameters),
    stepping("norm of all parameters in the loss", OUTSIDE, norm_of_all),
    stepping("`w @ w.T` in the loss", OUTSIDE, orthogonality),
    stepping("`F.linear(x, other.weight)`", OUTSIDE, linear_of_another),
    stepping("`x @ self.embed.weight.T`", OUTSIDE, product_with_embedding),
    stepping("difference between the weights of two layers", OUTSIDE, distance_of_layers),
    stepping("weight shared by two blocks", OUTSIDE, None, build=tie_layers),
    stepping("block used at two positions", OUTSIDE, None, build=tie_blocks),
    stepping("parameter of the `TrainModule` itself", OUTSIDE, with_own_parameter, build=own_parameter),
    stepping("layers called without `forward` of the module", OUTSIDE, without_forward),
    stepping("`functional_call` with scaled weights", OUTSIDE, functional),
    skipping("a different layer at each step", skip_on_all),
    skipping("the same layer at each step", skip_always),
    skipping("a layer on some ranks only", skip_on_some, by_part=True),
    skipping("different layers on different ranks", skip_another, by_part=True),
    skipping("on each rank, one of two heads with equal shapes", one_tower, build=equal_towers, by_part=True),
    skipping("on each rank, one of two heads with different shapes", one_tower, build=unequal_towers, by_part=True),
    skipping("one of two heads at each step, in turn", tower_in_turn, build=unequal_towers),
    skipping("a head on some ranks only", tower_on_some, build=equal_towers, by_part=True),
    skipping("a head at all steps", unused, build=equal_towers),
    skipping("layers before a `detach()`", detached),
    derived("`autograd.grad` of inputs with `create_graph`", penalty_on_inputs),
    # The square of a gradient is not linear in the batch: each rank has that of its own part.
    derived("`autograd.grad` of a weight with `create_graph`", penalty_on_weights, by_part=True),
    derived("`autograd.grad` of inputs", read_slope),
    derived("two forward passes before a backward pass", two_forwards),
    derived("additional forward pass under `no_grad`", forward_without_gradient),
    derived("`checkpoint(use_reentrant=False)`", recompute),
    derived("`checkpoint(use_reentrant=True)`", recompute_reentrant),
    derived("block called twice in a forward pass", block_twice),
    derived("block called twice with `checkpoint(use_reentrant=True)`", block_twice_reentrant),
    derived("`functional_call` with a copied state dict", self_distillation),
    stepping("`all_gather(sync_grads=True)`", COLLECTIVES, gathered_features, by_part=True),
    Action("`all_gather`", COLLECTIVES, WITH_ROWS, gathered_numbers, by_part=True),
    Action("`all_gather` of tensors with different sizes", COLLECTIVES, WITH_ROWS, gathered_unequal, by_part=True),
    Action("`all_reduce`", COLLECTIVES, WITH_ROWS, reduced, by_part=True),
]
