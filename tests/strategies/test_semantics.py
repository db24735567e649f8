"""A sample of the table of semantics; ``make semantics`` runs all of it."""

from __future__ import annotations

import pytest
from semantic_cells import ACTIONS, REFUSED, RIGHT, WRONG, Cell, Layout, Verdict, tried
from semantics import cells, sentences, spread, table

# What a rank imports first is part of the time of its first cell.
SECONDS = 60.0
BETWEEN, LAST = "on_train_batch_end", "on_before_optimizer_step"
SAMPLE = {
    "ddp": [
        ("`float(w.detach().norm())`", "callback.on_train_batch_end"),
        ("distance from the start", "on_fit_start+on_train_batch_end"),
        ("`deepcopy` of a block", "callback.on_train_batch_end"),
        ("`load_state_dict` of a block", BETWEEN),
        ("`p.data = ...`", "on_validation_epoch_start"),
        ("teacher moved by `p.data = `", "training_step"),
        ("weights swapped while validating", "on_validation_start+on_validation_end"),
        ("`prune.l1_unstructured`", "training_step"),
        ("`p.grad = tensor`", LAST),
        ("gradient surgery", LAST),
        ("`clip_grad_value_` of all", f"callback.{LAST}"),
        ("`p.register_hook`: rows masked", "__init__"),
        ("full backward hook", "on_fit_start"),
        ("learning rate set by hand", BETWEEN),
        ("momentum read", BETWEEN),
        ("two losses, two backward passes", "training_step"),
        ("penalty over `parameters()`", "training_step"),
        ("`functional_call` with other weights", "training_step"),
        ("another layer on each rank", "training_step"),
        ("`autograd.grad` of inputs with `create_graph`", "training_step"),
        ("`all_gather(sync_grads=True)`", "training_step"),
        ("`all_reduce`", "training_step"),
        ("a 0-d parameter", "training_step"),
        ("lazy layer", "setup"),
        ("reference copied", "configure_model"),
        ("block frozen", "on_train_epoch_start"),
        ("`deepcopy` of the module", BETWEEN),
    ],
    "fsdp": [
        ("`clamp_` of all", BETWEEN),
        ("`mul_` of a block", LAST),
        ("`p.grad.zero_()` of a block", "on_after_backward"),
        ("`clip_grad_norm_` of all", "manual"),
        ("`float(p.grad.norm())`", "manual"),
        ("`nn.init`", BETWEEN),
        ("`torch._foreach_mul_`", "training_step"),
        ("`w.detach().numpy()`", "training_step"),
        ("reference copied into the module", "on_fit_start"),
        ("forward hook changes the output", "__init__"),
        ("a block at two places", "training_step"),
        ("a forward pass without gradients before", "training_step"),
        ("`checkpoint`", "training_step"),
        ("0-d parameters in blocks", "training_step"),
        ("layer replaced", "setup"),
        ("groups that leave parameters out", "training_step"),
        ("parameters as keys", "training_step"),
    ],
    "zero2": [
        ("`mul_` of a block", "setup"),
        ("`torch._foreach_mul_`", "training_step"),
        ("`p.grad = tensor`", "manual"),
        ("`step(closure)`", "training_step"),
        ("an update every second batch", "training_step"),
        ("a weight of two blocks", "training_step"),
        ("`weight_norm`", "training_step"),
        ("`ParameterList`", "training_step"),
    ],
    "zero3": [
        ("two optimizers in turn", "training_step"),
        ("a block twice in a pass", "training_step"),
        ("a frozen block", "training_step"),
        ("`functional_call` with other weights", "training_step"),
        ("norms of `state_dict()`", "after fit"),
        ("a parameter without elements", "training_step"),
    ],
    "pipeline": [
        ("rows normalized", BETWEEN),
        ("`p.grad.mul_()` of a block", "on_after_backward"),
        ("optimizer of some parameters", "training_step"),
        ("a layer in every step", "training_step"),
        ("`load_state_dict` of a block", BETWEEN),
        ("state-dict hook", "on_fit_start"),
        ("parameters as keys", "training_step"),
    ],
}


@pytest.mark.parametrize(
    ("strategy", "action", "moment"), [(name, *each) for name, listed in SAMPLE.items() for each in listed]
)
def test_an_action_is_right_or_refused(strategy: str, action: str, moment: str) -> None:
    verdict = tried(Cell(action, moment, Layout(strategy, 2)), SECONDS)
    assert verdict.word != WRONG, verdict.what


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
