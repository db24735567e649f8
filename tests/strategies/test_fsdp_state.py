"""Canonical state under ``fsdp``: what is saved by any layout is loaded by any other, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from sharded_state import connected, loaded, saved, single_process
from small_gpt import Language

from phalanx.strategies import FSDPStrategy


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [(1, {"cpu_offload": True}), (2, {"replicas": 2}), (2, {"units": 10**6}), (2, {"cpu_offload": True}), (3, {})],
)
def test_state_taken_is_that_of_one_process(ranks: int, arguments: dict[str, Any]) -> None:
    results = run_on_ranks(ranks, saved, FSDPStrategy(**arguments))
    _, (model, slots) = single_process(2)
    for (own_model, own_slots), shapes in results:
        assert shapes == {name: tuple(tensor.shape) for name, tensor in model.items()}
        assert own_slots.keys() == slots.keys()
        torch.testing.assert_close(own_model, {name: t.float() for name, t in model.items()}, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(own_slots, slots, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("ranks", "arguments", "fresh"), [(1, {}, True), (2, {}, False), (3, {}, True), (2, {"replicas": 2}, True)]
)
def test_state_of_one_process_is_taken_over_exactly(ranks: int, arguments: dict[str, Any], fresh: bool) -> None:
    _, (model, slots) = single_process(2)
    losses, _ = single_process(5)
    for (own_model, own_slots), own_losses in run_on_ranks(
        ranks, loaded, FSDPStrategy(**arguments), (model, slots), fresh
    ):
        for name, tensor in model.items():
            assert torch.equal(own_model[name], tensor.float()), name
        assert own_slots.keys() == slots.keys()
        for name, each in slots.items():
            assert all(torch.equal(own_slots[name][slot], value) for slot, value in each.items()), name
        torch.testing.assert_close(own_losses, losses[2:], rtol=1e-5, atol=0)


def test_nothing_is_copied_to_be_saved() -> None:
    assert all(run_on_ranks(2, shares_memory))


def shares_memory() -> bool:
    strategy = connected(FSDPStrategy())
    module = Language()
    strategy.setup(module, [], training=False)
    held_here: dict[str, Any] = dict(module.named_parameters())
    shards = strategy.state.model_state(module)
    return all(
        shards[name].tensor.data_ptr() == parameter._local_tensor.data_ptr() for name, parameter in held_here.items()
    )
