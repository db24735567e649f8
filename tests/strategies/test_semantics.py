"""A sample of the table of semantics; ``make semantics`` runs all of it."""

from __future__ import annotations

import pytest
from semantic_cells import ACTIONS, REFUSED, RIGHT, WRONG, Cell, Layout, Verdict, tried
from semantics import cells, sentences, spread, table

# What a rank imports first is part of the time of its first cell.
SECONDS = 60.0
BETWEEN, LAST = "on_train_batch_end", "on_before_optimizer_step"
STEP = "training_step"
SAMPLE = {
    "ddp": [
        ("`float(w.detach().norm())`", "callback.on_train_batch_end"),
        ("distance from the initial weights", "on_fit_start+on_train_batch_end"),
        ("`deepcopy` of a block", "callback.on_train_batch_end"),
        ("`load_state_dict` of a block", BETWEEN),
        ("`p.data = ...`", "on_validation_epoch_start"),
        ("moving average of a teacher, with `p.data = ...`", STEP),
        ("weights replaced during validation", "on_validation_start+on_validation_end"),
        ("`prune.l1_unstructured`", STEP),
        ("`p.grad = tensor`", LAST),
        ("projection of a gradient (gradient surgery)", LAST),
        ("`clip_grad_value_` of all gradients", f"callback.{LAST}"),
        ("`p.register_hook` that masks rows", "__init__"),
        ("full backward hook that scales the gradient", "on_fit_start"),
        ("learning rate changed in a hook", BETWEEN),
        ("momentum buffers read", BETWEEN),
        ("two losses with separate backward passes", STEP),
        ("two backward passes with `retain_graph=True`", STEP),
        ("layers called without `forward` of the module", STEP),
        ("penalty on all `parameters()`", STEP),
        ("`functional_call` with scaled weights", STEP),
        ("`autograd.grad` of inputs with `create_graph`", STEP),
        ("`all_gather(sync_grads=True)`", STEP),
        ("`all_reduce`", STEP),
        ("parameter without dimensions", STEP),
        ("lazy layer initialized", "setup"),
        ("reference copy of the blocks outside the module", "configure_model"),
        ("block frozen", "on_train_epoch_start"),
        ("block unfrozen after an epoch", "on_train_epoch_start"),
        ("`step(closure)`", STEP),
        ("`deepcopy` of the module", BETWEEN),
    ],
    "fsdp": [
        ("`clamp_` of all weights", BETWEEN),
        ("`mul_` of a block", LAST),
        ("`p.grad.zero_()` of a block", "on_after_backward"),
        ("`clip_grad_norm_` of all gradients", "manual"),
        ("`float(p.grad.norm())`", "manual"),
        ("`nn.init`", BETWEEN),
        ("`torch._foreach_mul_` of all weights", STEP),
        ("`w.detach().numpy()`", STEP),
        ("reference copy of the blocks in the module", "on_fit_start"),
        ("forward hook that changes the output", "__init__"),
        ("block used at two positions", STEP),
        ("additional forward pass under `no_grad`", STEP),
        ("`checkpoint(use_reentrant=False)`", STEP),
        ("layer replaced", "setup"),
        ("parameter groups with only some of the parameters", STEP),
        ("parameters used as dict keys", STEP),
        ("moving average of a teacher, in place", STEP),
        ("moving average of a teacher, with `p.data = ...`", BETWEEN),
        ("weights multiplied by a mask", BETWEEN),
        ("rows of a weight normalized", BETWEEN),
        ("`self.log(w.norm())`", "on_after_backward"),
        ("`F.linear(x, other.weight)`", STEP),
        ("penalty on parameters stored in `__init__`", STEP),
        ("`p.grad = tensor`", LAST),
        ("`p.grad = None` of a block", "on_after_backward"),
        ("`clip_grad_value_` of all gradients", LAST),
        ("`clip_grad_norm_` of a block", LAST),
        ("projection of a gradient (gradient surgery)", LAST),
        ("`p.register_hook` that masks rows", "__init__"),
        ("`p.register_hook` that scales the gradient", "on_fit_start"),
        ("`register_post_accumulate_grad_hook`", "on_fit_start"),
        ("two optimizers, stepped one after the other", STEP),
        ("`step(closure)`", STEP),
        ("two losses with separate backward passes", STEP),
        ("two backward passes with `retain_graph=True`", STEP),
        ("weight shared by two blocks", STEP),
        ("block unfrozen after an epoch", "on_train_epoch_start"),
        ("layer added with a parameter group", "on_fit_start"),
        ("forward pass in a hook", BETWEEN),
        ("layers called without `forward` of the module", STEP),
    ],
    "hsdp": [
        ("`clamp_` of all weights", BETWEEN),
        ("`clip_grad_norm_` of all gradients", "manual"),
        ("penalty on all `parameters()`", STEP),
        ("`p.register_hook` that masks rows", "on_fit_start"),
    ],
    "zero1": [
        ("`clamp_` of all weights", LAST),
        ("`p.grad = None` of a block", LAST),
        ("a head on some ranks only", STEP),
        ("`clip_grad_norm_` under manual optimization", STEP),
    ],
    "zero2": [
        ("`mul_` of a block", "setup"),
        ("`torch._foreach_mul_` of all weights", STEP),
        ("`p.grad = tensor`", "manual"),
        ("`step(closure)`", STEP),
        ("optimizer step after every second batch", STEP),
        ("weight shared by two blocks", STEP),
        ("`weight_norm`", STEP),
        ("`ParameterList`", STEP),
        ("`load_state_dict` of a block", "on_fit_start"),
        ("rows of a weight normalized", BETWEEN),
        ("moving average of a teacher, with `p.data = ...`", STEP),
        ("different layers on different ranks", STEP),
        ("two losses with separate backward passes", STEP),
        ("`clip_grad_norm_` under manual optimization", STEP),
        ("penalty on parameters stored in `__init__`", STEP),
        ("`autograd.grad` of inputs with `create_graph`", STEP),
    ],
    "zero2-offload": [
        ("different layers on different ranks", STEP),
        ("`clip_grad_norm_` under manual optimization", STEP),
    ],
    "zero3": [
        ("rows of a weight set to zero", "callback.on_train_epoch_end"),
        ("rows of a weight normalized", STEP),
        ("moving average of a teacher, with `p.data = ...`", BETWEEN),
        ("a different layer at each step", STEP),
        ("`clip_grad_norm_` under manual optimization", STEP),
        ("`step(closure)`", STEP),
        ("penalty on all `parameters()`", STEP),
        ("penalty on parameters stored in `__init__`", STEP),
        ("`autograd.grad` of inputs with `create_graph`", STEP),
        ("block called twice in a forward pass", STEP),
        ("frozen block", STEP),
    ],
    "zero3-offload": [
        ("a different layer at each step", STEP),
        ("penalty on some parameters", STEP),
        ("`autograd.grad` of inputs with `create_graph`", STEP),
    ],
    "pipeline": [
        ("optimizer with only some of the parameters", STEP),
        ("state dict hook that adds an entry", "on_fit_start"),
        ("parameters used as dict keys", STEP),
    ],
}
# With a word of the error.
REFUSALS = [
    ("ddp", "different layers on different ranks", STEP, "ddp_find_unused_parameters_true"),
    ("fsdp", "parameters without dimensions in blocks", STEP, "blocks.0.gain"),
    ("fsdp", "different layers on different ranks", STEP, "different layers"),
    ("fsdp", "`autograd.grad` of inputs with `create_graph`", STEP, "create_graph"),
    ("fsdp", "`autograd.grad` of a weight with `create_graph`", STEP, "torch.autograd.grad"),
    ("fsdp", "block called twice with `checkpoint(use_reentrant=True)`", STEP, "use_reentrant"),
    ("fsdp", "`functional_call` with scaled weights", STEP, "functional_call"),
    ("fsdp", "complex parameter", STEP, "phase"),
    ("fsdp", "`Embedding(max_norm)`", STEP, "max_norm=0.5"),
    ("zero1", "bf16 layer outside the blocks", STEP, "extra.weight"),
    ("zero2", "layer added", "on_train_epoch_start", "extra.bias"),
    ("zero2", "block replaced by `nn.Identity`", "on_fit_start", "blocks.2.key.bias was removed"),
    ("zero3", "two optimizers, stepped one after the other", STEP, "strategy='fsdp'"),
    ("zero3", "`functional_call` with scaled weights", STEP, "functional_call"),
    ("zero3", "norms of the tensors in `state_dict()`", "after fit", "gather_weights"),
    ("zero3", "parameter without elements", STEP, "'none'"),
    ("zero3", "`deepcopy` of a block", "callback.on_train_batch_end", "copy.deepcopy"),
    ("pipeline", "rows of a weight normalized", BETWEEN, "is_meta"),
    ("pipeline", "`p.grad.mul_()` of a block", "on_after_backward", "on_before_optimizer_step"),
    ("pipeline", "the same layer at each step", STEP, "block 2"),
    ("pipeline", "`load_state_dict` of a block", BETWEEN, "is_meta"),
]


@pytest.mark.parametrize(
    ("strategy", "action", "moment"), [(name, *each) for name, listed in SAMPLE.items() for each in listed]
)
def test_an_action_is_right(strategy: str, action: str, moment: str) -> None:
    verdict = tried(Cell(action, moment, Layout(strategy, 2)), SECONDS)
    assert verdict.word == RIGHT, verdict.what


@pytest.mark.parametrize(("strategy", "action", "moment", "name"), REFUSALS)
def test_an_action_is_refused(strategy: str, action: str, moment: str, name: str) -> None:
    verdict = tried(Cell(action, moment, Layout(strategy, 2)), SECONDS)
    assert verdict.word == REFUSED, verdict.what
    assert name in verdict.what


@pytest.mark.parametrize(
    ("strategy", "word", "what"),
    [
        ("phalanx.strategies:DDPStrategy", RIGHT, ""),
        ("odd_strategies:Refusing", REFUSED, "use 'ddp'"),
        ("odd_strategies:Silent", WRONG, "no way out"),
        ("odd_strategies:Forgetful", WRONG, "off"),
        ("odd_strategies:Failing", WRONG, "size of tensor"),
        ("odd_strategies:Crashing", WRONG, "crash: exit code 7"),
    ],
)
def test_a_strategy_of_another_package_is_judged(strategy: str, word: str, what: str) -> None:
    verdict = tried(Cell("`clamp_` of all weights", BETWEEN, Layout(strategy, 2)), SECONDS)
    assert verdict.word == word, verdict.what
    assert what in verdict.what


def test_ranks_that_wait_are_wrong() -> None:
    verdict = tried(Cell("`clamp_` of all weights", BETWEEN, Layout("odd_strategies:Waiting", 2)), 0.5)
    assert (verdict.word, "hang" in verdict.what) == (WRONG, True)


def test_every_action_is_done_at_its_moments_under_every_strategy() -> None:
    whole, default = cells(), spread()
    assert {(each.action, each.layout.strategy) for each in whole} == {
        (each.action, each.layout.strategy) for each in default
    }
    assert set(default) < set(whole)
    assert {(each.action, each.moment) for each in default} == {
        (name, moment) for name, action in ACTIONS.items() for moment in action.moments
    }
    assert cells(["mine:Own"], [3], ["clamp"], [BETWEEN]) == [
        Cell("`clamp_` of all weights", BETWEEN, Layout("mine:Own", 3))
    ]


def test_the_table_counts_what_differs_and_lists_the_sentences() -> None:
    first, second, third = cells(["ddp"], [2], ["`clamp_`"])[:3]
    verdicts = {first: Verdict(RIGHT), second: Verdict(REFUSED, "ConfigurationError: use x."), third: Verdict(WRONG)}
    assert (
        table(verdicts).splitlines()[-1]
        == "| `clamp_` of all weights | = in 1 run, refused in 1 run, **wrong** in 1 run |"
    )
    assert table({first: Verdict(RIGHT)}).splitlines()[-1] == "| `clamp_` of all weights | = |"
    assert sentences(verdicts).splitlines()[-1] == "| `use x.` | `ddp` | `clamp_` of all weights |"
