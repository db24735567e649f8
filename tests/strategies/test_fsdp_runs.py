"""Runs under ``fsdp`` one after the other, evaluation, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from messages import refuses, says
from models import plain_steps, silent_trainer, windows_of
from parity_table import strategy_named
from ranks import run_on_ranks
from small_gpt import (
    GLOBAL_BATCH,
    Parallel,
    SmallGPT,
    by_hand,
    connected,
    loss_of,
    optimizer_of,
    per_update,
    small_gpt,
    token_data,
    token_loader,
    weights,
)
from torch import Tensor, nn

from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.core.precision import resolve_precision
from phalanx.strategies import FSDPStrategy, hsdp


def two_fits(first: str, second: str) -> tuple[list[float], dict[str, Tensor] | None, list[bool]]:
    module = Parallel()
    tied, whole = [], []
    for strategy in (first, second):
        trainer = silent_trainer(strategy=strategy_named(strategy, ""), devices=2, max_steps=3)
        trainer.fit(module, token_loader(GLOBAL_BATCH // trainer.fabric.world.data_size), token_loader(4, 12))
        tied.append(module.gpt.head.weight is module.gpt.embedding.weight)
        whole.append(all(not parameter.is_meta for parameter in module.parameters()))
    is_first = torch.distributed.get_rank() == 0
    return module.losses, weights(module.gpt) if is_first else None, [*tied, *(whole if is_first else [])]


@pytest.mark.parametrize(("first", "second"), [("fsdp", "ddp_find_unused_parameters_true"), ("fsdp+tp", "fsdp+tp")])
def test_a_second_fit_continues_from_the_weights_of_the_first(first: str, second: str) -> None:
    results = run_on_ranks(2, two_fits, first, second)
    losses, expected = two_fits_by_hand()
    torch.testing.assert_close(per_update([each[0] for each in results], [1], 6), losses, rtol=1e-5, atol=0)
    assert results[0][1] is not None
    torch.testing.assert_close(results[0][1], expected, rtol=1e-4, atol=2e-5)
    assert all(all(right) for _, _, right in results)


def two_fits_by_hand() -> tuple[Tensor, dict[str, Tensor]]:
    x, y = token_data().tensors
    gpt, losses = small_gpt(), list[float]()
    for _ in range(2):
        batches = windows_of(GLOBAL_BATCH, [1], 3)
        losses += plain_steps(optimizer_of(gpt), lambda rows: loss_of(gpt(x[rows]), y[rows]), batches)
    return torch.tensor(losses), weights(gpt)


def evaluated(arguments: dict[str, Any]) -> tuple[float, list[Tensor], list[str]]:
    module = Parallel()
    strategy = FSDPStrategy(**arguments)
    trainer = silent_trainer(strategy=strategy, devices=2, max_steps=2)
    trainer.fit(module, token_loader(GLOBAL_BATCH // trainer.fabric.world.data_size), token_loader(3, 20))
    (results,) = trainer.validate(module, token_loader(3, 20))
    predictions = trainer.predict(module, token_loader(4, 8))
    return (
        results["val_loss"],
        [each.clone() for each in predictions or []],
        [type(p.data).__name__ for p in module.parameters()],
    )


@pytest.mark.parametrize(
    "arguments", [{"gather_weights": "rank_zero"}, {"gather_weights": "none"}, {"tensor_parallel": 2}]
)
def test_validate_and_predict_after_a_fit(arguments: dict[str, Any]) -> None:
    x, y = token_data().tensors
    gpt = small_gpt()
    gpt.load_state_dict(by_hand([1], None, 2)[1], strict=False)
    for loss, predictions, kinds in run_on_ranks(2, evaluated, arguments):
        assert loss == pytest.approx(loss_of(gpt(x[:20]), y[:20]).item(), rel=1e-5)
        for batch in predictions:
            assert batch.shape[1:] == (6, 13)
        assert ("DTensor" in kinds) == (arguments.get("gather_weights") == "none")


def shares_memory() -> bool:
    strategy = connected(FSDPStrategy())
    module = Parallel()
    strategy.setup(module, [], training=False)
    held_here: dict[str, Any] = dict(module.named_parameters())
    shards = strategy.state.model_state(module)
    return all(
        shards[name].tensor.data_ptr() == parameter._local_tensor.data_ptr() for name, parameter in held_here.items()
    )


def test_nothing_is_copied_to_be_saved() -> None:
    assert run_on_ranks(2, shares_memory) == [True, True]


# ---- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"units": "Block"}, "units='Block'"),
        ({"units": True}, "units=True"),
        ({"units": (nn.Linear, 3)}, "units=("),
        ({"units": int}, "units="),
        ({"replicas": "nodes"}, "replicas='nodes'"),
        ({"tensor_parallel": 1.5}, "tensor_parallel=1.5"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"reshard_after_forward": 2}, "reshard_after_forward=2"),
        ({"cpu_offload": "yes"}, "cpu_offload='yes'"),
        ({"activation_checkpointing": 1}, "activation_checkpointing=1"),
        ({"reduce_dtype": "bf16"}, "reduce_dtype='bf16'"),
        ({"gather_weights": "rank_0"}, "'rank_zero'"),
    ],
)
def test_bad_arguments_are_refused_when_they_are_given(arguments: dict[str, Any], words: str) -> None:
    with refuses(ConfigurationError, words):
        FSDPStrategy(**arguments)


@pytest.mark.parametrize(
    ("strategy", "world", "nodes", "words"),
    [
        (FSDPStrategy(replicas=2), 3, 1, "dp_replicate=2"),
        (FSDPStrategy(tensor_parallel=2), 3, 1, "tp out of 1, 3"),
        (FSDPStrategy(tensor_parallel=2, replicas=2), 6, 1, "dp_replicate=2 x tp=2"),
        (hsdp(), 3, 1, "strategy='hsdp'"),
    ],
)
def test_ranks_that_do_not_divide_are_refused_before_any_process(
    strategy: FSDPStrategy, world: int, nodes: int, words: str
) -> None:
    with refuses(ConfigurationError, words):
        strategy.check(world, "cpu", nodes, resolve_precision(None))


def test_hsdp_replicates_over_nodes() -> None:
    for world, nodes in ((1, 1), (2, 1), (4, 1), (6, 3), (8, 2)):
        hsdp().check(world, "cpu", nodes, resolve_precision(None))
    assert hsdp().name == "hsdp"


def refused(arguments: dict[str, Any], module: nn.Module) -> tuple[str, bool]:
    strategy = FSDPStrategy(**arguments)
    strategy.connect("cpu", 1, resolve_precision(None))
    with pytest.raises(ConfigurationError) as caught:
        strategy.setup(module, [], training=True)
    return str(caught.value), all(type(each.data) is Tensor and not each.is_meta for each in module.parameters())


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("arguments", "module", "words"),
    [
        ({"units": nn.Conv2d}, SmallGPT(1), "SmallGPT"),
        ({"activation_checkpointing": nn.Conv2d}, SmallGPT(1), "activation_checkpointing"),
        ({"activation_checkpointing": True}, nn.Linear(2, 2), "activation_checkpointing"),
        ({}, Scalar(), "temperature"),
        ({}, nn.Sequential(nn.LazyLinear(3)), "lazy"),
    ],
)
def test_what_does_not_fit_the_module_is_refused_and_leaves_it_alone(
    arguments: dict[str, Any], module: nn.Module, words: str
) -> None:
    answers = run_on_ranks(2, refused, arguments, module)
    says([message for message, _ in answers], words)
    assert all(untouched or isinstance(module, nn.Sequential) for _, untouched in answers)
