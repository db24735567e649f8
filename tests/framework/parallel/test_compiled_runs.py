"""Compiled runs on several ranks: resumed from eager ones and the other way round, and blocks of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_graphs import counting, forget_compiled, num_graphs
from models import silent_trainer
from ranks import run_on_ranks
from small_gpt import (
    LENGTH,
    VOCABULARY,
    Block,
    Language,
    assert_close,
    loss_of,
    optimizer_of,
    small_gpt,
    token_loader,
    weights,
)
from torch import Tensor, nn

from phalanx import Fabric
from phalanx.framework.checkpoint.reader import open_checkpoint

STRATEGIES = {"ddp": "ddp_find_unused_parameters_true", "fsdp": "fsdp", "zero2": "zero2"}
# What a block is compiled for: training and evaluation, each for one number of rows and then for any.
MOST_GRAPHS = 4


# ---- resumed runs ----------------------------------------------------------------------------------------------------


def fitted(strategy: str, root: str, compile: Any, steps: int, start: str | None) -> dict[str, Tensor]:
    """Train until ``steps``, in windows of two micro-batches, and save; return the weights on rank 0.

    The third window ends with a smaller micro-batch, the epoch of three windows with a validation.
    """
    forget_compiled()
    module = Language(layers=2)
    trainer = silent_trainer(
        strategy=STRATEGIES[strategy],
        devices=2,
        max_steps=steps,
        compile=compile,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        default_root_dir=root,
    )
    trainer.fit(module, token_loader(4, 44), token_loader(4, 12), ckpt_path=start)
    trainer.save_checkpoint(f"{root}/{steps}.ckpt")
    return weights(module) if trainer.is_global_zero else {}


def resumed_both_ways(strategy: str, root: str) -> list[int]:
    """Compare runs that change at a checkpoint with one that does not; return the numbers of graphs."""
    compiled = {"backend": counting}
    expected, counts = fitted(strategy, f"{root}/eager", False, 4, None), []
    for name, first, second in (("to_eager", compiled, False), ("to_compiled", False, compiled)):
        fitted(strategy, f"{root}/{name}", first, 2, None)
        counts.append(num_graphs())
        assert_close(fitted(strategy, f"{root}/{name}", second, 4, f"{root}/{name}/2.ckpt"), expected)
        counts.append(num_graphs())
    return counts


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_eager_and_compiled_runs_resume_each_other_on_ranks(strategy: str, tmp_path: Path) -> None:
    for first, after, before, second in run_on_ranks(2, resumed_both_ways, strategy, str(tmp_path), timeout=120):
        assert (after, before) == (0, 0)
        for count in (first, second):
            assert 0 < count <= MOST_GRAPHS
    paths = [tmp_path / name / f"{step}.ckpt" for name in ("to_eager", "to_compiled") for step in (2, 4)]
    expected = open_checkpoint(tmp_path / "eager" / "4.ckpt")
    for path in paths:
        found = open_checkpoint(path)
        assert found.sections == expected.sections
        for section in found.sections:
            assert set(found.names(section)) == set(expected.names(section))


# ---- blocks ----------------------------------------------------------------------------------------------------------


class Breaking(Block):
    """A block with a line that the compiler cannot take in, so that it compiles what is before and after it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        torch._dynamo.graph_break()
        output: Tensor = y + self.down(nn.functional.gelu(self.up(x)))
        return output


class OwnBlocks(Language):
    """The small transformer with blocks that break the graph."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        for block in self.gpt.blocks:
            block.__class__ = Breaking


def of_own_blocks(strategy: str, ranks: int) -> list[int]:
    """Train eager and compiled, and compare; return the numbers of graphs."""
    found, counts = [], []
    for compile in (False, {"backend": counting}):
        forget_compiled()
        module = OwnBlocks()
        trainer = silent_trainer(strategy=strategy, devices=ranks, max_steps=3, compile=compile)
        trainer.fit(module, token_loader(4))
        found.append(weights(module) if trainer.is_global_zero else {})
        counts.append(num_graphs())
    assert_close(found[1], found[0])
    return counts


@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
def test_blocks_with_a_graph_break_train_the_same_model(strategy: str) -> None:
    name = STRATEGIES.get(strategy, strategy)
    results = [of_own_blocks(name, 1)] if name == "single" else run_on_ranks(2, of_own_blocks, name, 2)
    for eager, compiled in results:
        assert eager == 0
        assert compiled >= 2


# ---- a loop of one's own ---------------------------------------------------------------------------------------------


def loop_weights(strategy: str, compile: Any) -> dict[str, Tensor]:
    """Train in windows of two micro-batches through a Fabric."""
    forget_compiled()
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=2, compile=compile, accumulate=2)
    original = small_gpt(2)
    names = list(original.state_dict())
    model, optimizer = fabric.setup(original, optimizer_of(original))
    for number, (tokens, labels) in enumerate(fabric.setup_dataloaders(token_loader(4, 32))):
        with fabric.accumulate(model):
            fabric.backward(loss_of(model(tokens), labels))
            optimizer.step()
            optimizer.zero_grad()
        if number == 1:
            with torch.no_grad():
                assert model(tokens).shape == (len(tokens), LENGTH, VOCABULARY)
    found = {name: tensor.clone() for name, tensor in fabric.full_state_dict(model).items()}
    assert not found or list(found) == names
    fabric.free_memory()
    assert not any("forward" in vars(part) for part in original.modules())
    return found


def both_loops(strategy: str) -> int:
    expected = loop_weights(strategy, False)
    assert num_graphs() == 0
    assert_close(loop_weights(strategy, {"backend": counting}), expected)
    return num_graphs()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_compiled_fabric_trains_the_same_model(strategy: str) -> None:
    for count in run_on_ranks(2, both_loops, STRATEGIES[strategy]):
        assert 0 < count <= MOST_GRAPHS
