"""Dispatch of tokens to experts on other ranks: outputs, gradients, and what is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from long_sequences import WIDTH, Experts
from ranks import run_on_ranks
from torch import Tensor

from phalanx.strategies.fsdp.dispatch import Dispatch

TOTAL, TOP = 6, 2


def routed(tokens: int, first_only: bool, total: int = TOTAL, top: int = TOP) -> tuple[Experts, list[Tensor]]:
    """Return experts, and tokens with the numbers and weights of their experts."""
    torch.manual_seed(3)
    experts = Experts(total)
    chances = torch.rand(tokens, total)
    if first_only:
        chances[:, :top] += 1.0
    weights, index = chances.topk(top)
    return experts, [torch.randn(tokens, WIDTH), index, weights]


def dispatched(sizes: list[int], first_only: bool, total: int = TOTAL, top: int = TOP) -> Any:
    """Return this rank's outputs and gradients, and the numbers of rows of tokens and sums that it sent."""
    experts, (hidden, index, weights) = routed(sum(sizes), first_only, total, top)
    rank, size = dist.get_rank(), dist.get_world_size()
    start = sum(sizes[:rank])
    mine = slice(start, start + sizes[rank])
    hidden, weights = (each[mine].clone().requires_grad_() for each in (hidden, weights))
    share = total // size
    own = Experts(share)
    for name, parameter in own.named_parameters():
        parameter.data = experts.get_parameter(name).detach()[rank * share : (rank + 1) * share].clone()
    sent: list[int] = []
    plain = dist.all_to_all_single

    def counted(output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        if given.dim() == 2 and given.shape[1] == WIDTH:
            sent.append(len(given))
        return plain(output, given, *args, **kwargs)

    dist.all_to_all_single = counted  # type: ignore[assignment]
    try:
        group = dist.group.WORLD
        assert group is not None
        output = Dispatch(group, share, own)(hidden, index[mine], weights)
        output.square().sum().backward()
    finally:
        dist.all_to_all_single = plain
    gradients = {name: each.grad for name, each in own.named_parameters()}
    return output.detach(), hidden.grad, weights.grad, gradients, sent


@pytest.mark.parametrize(
    ("sizes", "first_only", "total", "top"),
    [
        ([0, 0], False, TOTAL, TOP),
        ([4, 4], True, TOTAL, TOP),
        ([2, 0, 7], False, TOTAL, TOP),
        # All experts for each token, one expert for each rank, and both.
        ([3, 2], False, TOTAL, TOTAL),
        ([3, 0, 2], False, 3, 1),
        ([1, 4], False, 2, 2),
    ],
)
def test_outputs_and_gradients_are_those_of_one_process(
    sizes: list[int], first_only: bool, total: int, top: int
) -> None:
    experts, (hidden, index, weights) = routed(sum(sizes), first_only, total, top)
    hidden.requires_grad_()
    weights.requires_grad_()
    expected = experts(hidden, index, weights)
    expected.square().sum().backward()
    results = run_on_ranks(len(sizes), dispatched, sizes, first_only, total, top)
    assert hidden.grad is not None
    assert weights.grad is not None
    for position, whole in enumerate((expected.detach(), hidden.grad, weights.grad)):
        torch.testing.assert_close(torch.cat([each[position] for each in results]), whole)
    for name, parameter in experts.named_parameters():
        # For a mean over all ranks, of which those with the same experts are averaged over.
        found = torch.cat([each[3][name] for each in results]) * len(sizes)
        torch.testing.assert_close(found, torch.zeros_like(found) if parameter.grad is None else parameter.grad)


def test_a_token_is_sent_once_to_a_rank_that_has_several_of_its_experts() -> None:
    tokens, sums = zip(*(each[4][:2] for each in run_on_ranks(2, dispatched, [4, 3], True)), strict=True)
    assert tokens == (4, 3)
    assert sums == (7, 0)
