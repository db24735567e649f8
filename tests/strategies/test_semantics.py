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
        ("distance from the start", "on_fit_start+on_train_batch_end"),
        ("`deepcopy` of a block", "callback.on_train_batch_end"),
        ("`load_state_dict` of a block", BETWEEN),
        ("`p.data = ...`", "on_validation_epoch_start"),
        ("teacher moved by `p.data = `", STEP),
        ("weights swapped while validating", "on_validation_start+on_validation_end"),
        ("`prune.l1_unstructured`", STEP),
        ("`p.grad = tensor`", LAST),
        ("gradient surgery", LAST),
        ("`clip_grad_value_` of all", f"callback.{LAST}"),
        ("`p.register_hook`: rows masked", "__init__"),
        ("full backward hook", "on_fit_start"),
        ("learning rate set by hand", BETWEEN),
        ("momentum read", BETWEEN),
        ("two losses, two backward passes", STEP),
        ("`retain_graph`, two backward passes", STEP),
        ("layers called without `forward`", STEP),
        ("penalty over `parameters()`", STEP),
        ("`functional_call` with other weights", STEP),
        ("`autograd.grad` of inputs with `create_graph`", STEP),
        ("`all_gather(sync_grads=True)`", STEP),
        ("`all_reduce`", STEP),
        ("a 0-d parameter", STEP),
        ("lazy layer", "setup"),
        ("reference copied", "configure_model"),
        ("block frozen", "on_train_epoch_start"),
        ("block unfrozen later", "on_train_epoch_start"),
        ("`step(closure)`", STEP),
        ("`deepcopy` of the module", BETWEEN),
    ],
    "fsdp": [
        ("`clamp_` of all", BETWEEN),
        ("`mul_` of a block", LAST),
        ("`p.grad.zero_()` of a block", "on_after_backward"),
        ("`clip_grad_norm_` of all", "manual"),
        ("`float(p.grad.norm())`", "manual"),
        ("`nn.init`", BETWEEN),
        ("`torch._foreach_mul_`", STEP),
        ("`w.detach().numpy()`", STEP),
        ("reference copied into the module", "on_fit_start"),
        ("forward hook changes the output", "__init__"),
        ("a block at two places", STEP),
        ("a forward pass without gradients before", STEP),
        ("`checkpoint`", STEP),
        ("layer replaced", "setup"),
        ("groups that leave parameters out", STEP),
        ("parameters as keys", STEP),
        ("teacher moved in place", STEP),
        ("teacher moved by `p.data = `", BETWEEN),
        ("weights masked", BETWEEN),
        ("rows normalized", BETWEEN),
        ("`self.log(w.norm())`", "on_after_backward"),
        ("`F.linear(x, other.weight)`", STEP),
        ("penalty over parameters kept since `__init__`", STEP),
        ("`p.grad = tensor`", LAST),
        ("`p.grad = None` of a block", "on_after_backward"),
        ("`clip_grad_value_` of all", LAST),
        ("`clip_grad_norm_` of a block", LAST),
        ("gradient surgery", LAST),
        ("`p.register_hook`: rows masked", "__init__"),
        ("`p.register_hook`: scaled", "on_fit_start"),
        ("`register_post_accumulate_grad_hook`", "on_fit_start"),
        ("two optimizers in turn", STEP),
        ("`step(closure)`", STEP),
        ("two losses, two backward passes", STEP),
        ("`retain_graph`, two backward passes", STEP),
        ("a weight of two blocks", STEP),
        ("block unfrozen later", "on_train_epoch_start"),
        ("layer added with its parameter group", "on_fit_start"),
        ("a forward pass in a hook", BETWEEN),
        ("layers called without `forward`", STEP),
    ],
    "hsdp": [
        ("`clamp_` of all", BETWEEN),
        ("`clip_grad_norm_` of all", "manual"),
        ("penalty over `parameters()`", STEP),
        ("`p.register_hook`: rows masked", "on_fit_start"),
    ],
    "zero1": [
        ("`clamp_` of all", LAST),
        ("`p.grad = None` of a block", LAST),
        ("a tower on one rank", STEP),
        ("clipped in a manual step", STEP),
    ],
    "zero2": [
        ("`mul_` of a block", "setup"),
        ("`torch._foreach_mul_`", STEP),
        ("`p.grad = tensor`", "manual"),
        ("`step(closure)`", STEP),
        ("an update every second batch", STEP),
        ("a weight of two blocks", STEP),
        ("`weight_norm`", STEP),
        ("`ParameterList`", STEP),
        ("`load_state_dict` of a block", "on_fit_start"),
        ("rows normalized", BETWEEN),
        ("teacher moved by `p.data = `", STEP),
        ("another layer on each rank", STEP),
        ("two losses, two backward passes", STEP),
        ("clipped in a manual step", STEP),
        ("penalty over parameters kept since `__init__`", STEP),
        ("`autograd.grad` of inputs with `create_graph`", STEP),
    ],
    "zero2-offload": [
        ("another layer on each rank", STEP),
        ("clipped in a manual step", STEP),
    ],
    "zero3": [
        ("rows set to zero", "callback.on_train_epoch_end"),
        ("rows normalized", STEP),
        ("teacher moved by `p.data = `", BETWEEN),
        ("another layer in each step", STEP),
        ("clipped in a manual step", STEP),
        ("`step(closure)`", STEP),
        ("penalty over `parameters()`", STEP),
        ("penalty over parameters kept since `__init__`", STEP),
        ("`autograd.grad` of inputs with `create_graph`", STEP),
        ("a block twice in a pass", STEP),
        ("a frozen block", STEP),
    ],
    "zero3-offload": [
        ("another layer in each step", STEP),
        ("penalty over some parameters", STEP),
        ("`autograd.grad` of inputs with `create_graph`", STEP),
    ],
    "pipeline": [
        ("optimizer of some parameters", STEP),
        ("state-dict hook", "on_fit_start"),
        ("parameters as keys", STEP),
    ],
}
# With a word of the error.
REFUSALS = [
    ("ddp", "another layer on each rank", STEP, "ddp_find_unused_parameters_true"),
    ("fsdp", "0-d parameters in blocks", STEP, "blocks.0.gain"),
    ("fsdp", "another layer on each rank", STEP, "different layers"),
    ("fsdp", "`autograd.grad` of inputs with `create_graph`", STEP, "create_graph"),
    ("fsdp", "`autograd.grad` of a weight with `create_graph`", STEP, "torch.autograd.grad"),
    ("fsdp", "a block twice, reentrant", STEP, "use_reentrant"),
    ("fsdp", "`functional_call` with other weights", STEP, "functional_call"),
    ("fsdp", "a complex parameter", STEP, "phase"),
    ("fsdp", "`Embedding(max_norm)`", STEP, "max_norm=0.5"),
    ("zero1", "a bf16 layer beside", STEP, "extra.weight"),
    ("zero2", "layer added", "on_train_epoch_start", "extra.bias"),
    ("zero2", "block replaced by `nn.Identity`", "on_fit_start", "blocks.2.key.bias was removed"),
    ("zero3", "two optimizers in turn", STEP, "strategy='fsdp'"),
    ("zero3", "`functional_call` with other weights", STEP, "functional_call"),
    ("zero3", "norms of `state_dict()`", "after fit", "gather_weights"),
    ("zero3", "a parameter without elements", STEP, "'none'"),
    ("zero3", "`deepcopy` of a block", "callback.on_train_batch_end", "copy.deepcopy"),
    ("pipeline", "rows normalized", BETWEEN, "is_meta"),
    ("pipeline", "`p.grad.mul_()` of a block", "on_after_backward", "on_before_optimizer_step"),
    ("pipeline", "a layer in every step", STEP, "block 2"),
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
    verdict = tried(Cell("`clamp_` of all", BETWEEN, Layout(strategy, 2)), SECONDS)
    assert verdict.word == word, verdict.what
    assert what in verdict.what


def test_ranks_that_wait_are_wrong() -> None:
    verdict = tried(Cell("`clamp_` of all", BETWEEN, Layout("odd_strategies:Waiting", 2)), 0.5)
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
    assert cells(["mine:Own"], [3], ["clamp"], [BETWEEN]) == [Cell("`clamp_` of all", BETWEEN, Layout("mine:Own", 3))]


def test_the_table_counts_what_differs_and_lists_the_sentences() -> None:
    first, second, third = cells(["ddp"], [2], ["`clamp_`"])[:3]
    verdicts = {first: Verdict(RIGHT), second: Verdict(REFUSED, "ConfigurationError: use x."), third: Verdict(WRONG)}
    assert table(verdicts).splitlines()[-1] == "| `clamp_` of all | = 1, refused 1, **wrong** 1 |"
    assert table({first: Verdict(RIGHT)}).splitlines()[-1] == "| `clamp_` of all | = |"
    assert sentences(verdicts).splitlines()[-1] == "| `clamp_` of all | ddp | use x. |"
