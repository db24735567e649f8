"""``Split`` as an optimizer of torch: patterns, groups, state, schedulers, copies, and what it refuses."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from messages import refuses
from models import Regressor, loader, network, regression_data, silent_trainer, weights_of
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from phalanx import Split
from phalanx.callbacks import LearningRateMonitor
from phalanx.framework.core.errors import ConfigurationError

MATRICES: dict[Any, Any] = {"*.weight": partial(Muon, lr=0.02), "*": partial(AdamW, lr=0.01)}


def backward(net: nn.Module, start: int = 0) -> None:
    x, y = regression_data().tensors
    nn.functional.mse_loss(net(x[start : start + 8]), y[start : start + 8]).backward()


def trained(net: nn.Module, *optimizers: Optimizer, steps: int = 4, first: int = 0) -> Tensor:
    for step in range(first, first + steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(net, 8 * step)
        for optimizer in optimizers:
            optimizer.step()
    return weights_of(net)


def by_hand(steps: int) -> Tensor:
    net = network()
    weights, biases = [[p for n, p in net.named_parameters() if n.endswith(end)] for end in ("weight", "bias")]
    return trained(net, Muon(weights, lr=0.02), AdamW(biases, lr=0.01), steps=steps)


def test_updates_are_those_of_the_optimizers() -> None:
    net = network()
    split = Split(net.named_parameters(), MATRICES)
    assert torch.equal(trained(net, split), by_hand(4))
    assert [type(part) for part in split.optimizers] == [Muon, AdamW]
    assert [(group["name"], group["pattern"]) for group in split.param_groups] == [("Muon", "*.weight"), ("AdamW", "*")]


def test_the_first_pattern_applies_and_a_tuple_has_several() -> None:
    net = network()
    split = Split(net.named_parameters(), {("0.bias", "3.*"): SGD, "*": AdamW})
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in split.param_groups]
    assert groups == [["0.bias", "3.weight", "3.bias"], ["0.weight"]]
    assert split.param_groups[0]["pattern"] == "0.bias, 3.*"


def test_groups_of_a_factory_and_optimizers_of_one_class_have_unique_names() -> None:
    def grouped(parameters: list[Tensor]) -> AdamW:
        groups: list[dict[str, Any]] = [{"params": parameters[:1], "name": "first"}, {"params": parameters[1:]}]
        return AdamW(groups)

    split = Split(network().named_parameters(), {"0.*": grouped, "*": AdamW})
    assert [group["name"] for group in split.param_groups] == ["first", "AdamW-1", "AdamW-2"]


def test_state_dict_has_the_form_of_torch_and_loads() -> None:
    net = network()
    split = Split(net.named_parameters(), MATRICES)
    trained(net, split, steps=2)
    buffer = io.BytesIO()
    torch.save((net.state_dict(), split.state_dict()), buffer)
    buffer.seek(0)
    weights, state = torch.load(buffer)
    assert [group["params"] for group in state["param_groups"]] == [[0, 1], [2, 3]]
    assert set(state["state"][0]) == {"momentum_buffer"}
    assert set(state["state"][2]) == {"step", "exp_avg", "exp_avg_sq"}

    other = network(seed=9)
    other.load_state_dict(weights)
    # Under another pattern, whose group keeps its own.
    again = Split(other.named_parameters(), {"?.weight": partial(Muon, lr=1.0), "*": partial(AdamW, lr=1.0)})
    again.load_state_dict(state)
    assert [group["pattern"] for group in again.param_groups] == ["?.weight", "*"]
    assert torch.equal(trained(other, again, steps=2, first=2), by_hand(4))


def test_an_optimizer_with_state_from_the_start_keeps_it_and_loads() -> None:
    kinds: dict[Any, Any] = {"*.weight": Muon, "*": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5)}
    net, other = network(), network()
    split = Split(net.named_parameters(), kinds)
    weights, biases = [[p for n, p in other.named_parameters() if n.endswith(end)] for end in ("weight", "bias")]
    expected = trained(other, Muon(weights), torch.optim.Adagrad(biases, lr=0.1, initial_accumulator_value=0.5))
    trained(net, split, steps=2)
    split.load_state_dict(copy.deepcopy(split.state_dict()))
    assert torch.equal(trained(net, split, steps=2, first=2), expected)
    assert set(split.state) == set(net.parameters())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: torch.load(saved(pair), weights_only=False)])
def test_a_copy_steps_by_itself(copied: Callable[[Any], Any]) -> None:
    net = network()
    split = Split(net.named_parameters(), MATRICES)
    trained(net, split, steps=2)
    other, again = copied((net, split))
    assert torch.equal(trained(other, again, steps=2, first=2), by_hand(4))
    assert torch.equal(weights_of(net), by_hand(2))


def saved(pair: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(pair, buffer)
    buffer.seek(0)
    return buffer


def test_a_scheduler_changes_every_group_from_its_own_rate() -> None:
    net = network()
    split = Split(net.named_parameters(), MATRICES)
    scheduler = LambdaLR(split, lambda step: 0.5**step)
    trained(net, split, steps=1)
    scheduler.step()
    assert [group["lr"] for group in split.param_groups] == [0.01, 0.005]
    assert [part.param_groups[0]["lr"] for part in split.optimizers] == [0.01, 0.005]


def test_a_closure_runs_once_before_all_updates() -> None:
    net = network()
    split = Split(net.named_parameters(), MATRICES)
    calls = []

    def closure() -> str:
        calls.append(torch.is_grad_enabled())
        backward(net)
        return "loss"

    assert split.step(closure) == "loss"
    assert calls == [True]
    assert torch.equal(weights_of(net), by_hand(1))


def test_a_group_is_added_to_the_optimizer_that_its_pattern_names() -> None:
    net, new = network(), nn.Parameter(torch.ones(3))
    split = Split(net.named_parameters(), MATRICES)
    with refuses(ConfigurationError, "'pattern'", "'*.weight'", "'*'"):
        split.add_param_group({"params": [new]})
    split.add_param_group({"params": [new], "pattern": "*"})
    assert split.param_groups[-1] is split.optimizers[1].param_groups[-1]
    assert split.param_groups[-1]["betas"] == (0.9, 0.999)
    new.grad = torch.ones(3)
    split.step()
    assert torch.allclose(new, torch.full((3,), 0.99 - 0.0001), atol=1e-4)


def test_frozen_parameters_need_no_pattern() -> None:
    net = network()
    net[0].requires_grad_(False)
    assert len(Split(net.named_parameters(), {"3.*": SGD}).param_groups[0]["params"]) == 2


class SplitRegressor(Regressor):
    """Trains with a ``Split``, and a scheduler of one of its optimizers."""

    def configure_optimizers(self) -> Any:
        split = Split(self.named_parameters(), {"*.weight": partial(SGD, lr=0.2), "*": partial(SGD, lr=0.1)})
        return [split], [{"scheduler": LambdaLR(split.optimizers[0], lambda step: 0.5**step), "interval": "step"}]


def test_a_scheduler_may_have_one_of_the_optimizers(tmp_path: Any) -> None:
    module, monitor = SplitRegressor(), LearningRateMonitor()
    trainer = silent_trainer(
        max_steps=3, log_every_n_steps=1, callbacks=[monitor], logger=True, default_root_dir=tmp_path
    )
    trainer.fit(module, loader())
    assert monitor.lrs["lr-SGD/SGD"] == pytest.approx([0.2, 0.1, 0.05])
    assert monitor.lrs["lr-Split/SGD"][:1] == [0.2]
    assert monitor.lrs["lr-Split/SGD-1"][:1] == [0.1]


def fails(parameters: list[Tensor]) -> Optimizer:
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("optimizers", "name"),
    [
        ({"0.*": Muon, "*": SGD}, "'0.*'"),
        ({"1.weights": SGD, "*": SGD}, "'1.weights'"),
        ({"*": SGD, "0.*": Muon}, "'0.*'"),
        ({"0.*": SGD}, "3.weight"),
        ({"*": SGD([torch.zeros(1)])}, "SGD"),
        ({"*": fails}, "'*'"),
        ({"*": lambda parameters: 3}, "int"),
        ({"*": lambda parameters: SGD(parameters[1:])}, "'*'"),
        ({"*": torch.optim.LBFGS}, "LBFGS"),
        ({3: SGD}, "3"),
        ({}, "dict"),
    ],
)
def test_wrong_patterns_and_factories_are_refused(optimizers: Any, name: str) -> None:
    with refuses(ConfigurationError, name, varies=r"Muon only .*(?= It matches)"):
        Split(network().named_parameters(), optimizers)


def test_parameters_without_names_are_refused() -> None:
    with refuses(ConfigurationError, "Parameter", "named_parameters"):
        Split(network().parameters(), {"*": SGD})  # type: ignore[arg-type]


@pytest.mark.parametrize("patterns", [("*",), ("b", "*")])
def test_a_parameter_with_two_names_is_refused(patterns: tuple[str, ...]) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with refuses(ConfigurationError, "self.named_parameters"):
        Split([("a", weight), ("b", weight)], dict.fromkeys(patterns, SGD))
