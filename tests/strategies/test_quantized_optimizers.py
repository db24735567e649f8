"""torchao's optimizers with 8-bit, 4-bit and fp8 state: trained, saved and resumed under single, ddp and fsdp.

torchao compiles the update, which takes a minute on a CPU; the tests run it eagerly.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import silent_trainer
from quantized_model import KINDS, ROWS, STEPS, QuantizedModel, data, trained
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import Fabric
from phalanx.framework.checkpoint.reader import open_checkpoint
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.memory.measure import optimizer_state
from phalanx.precisions import Float32True
from phalanx.strategies import FSDPStrategy


def run(place: str, *args: Any) -> tuple[Tensor, Tensor | None]:
    """Call ``trained`` at a place such as ``ddp@2``; return the mean losses and the weights."""
    strategy, _, ranks = place.partition("@")
    results = run_on_ranks(int(ranks), trained, strategy, int(ranks), *args)
    return torch.tensor([losses for losses, _ in results]).mean(0), results[0][1]


@pytest.mark.parametrize(
    ("first", "then", "kind"),
    [("single@1", "fsdp@2", KINDS[0]), ("fsdp@2", "single@1", KINDS[1]), ("ddp@2", "fsdp@2", KINDS[2])],
)
def test_a_run_resumes_under_another_strategy(first: str, then: str, kind: str, tmp_path: Path) -> None:
    losses, weights = run(first, kind, str(tmp_path / "a"), STEPS, None)
    run(first, kind, str(tmp_path / "b"), 2, None)
    rest, resumed = run(then, kind, str(tmp_path / "b"), STEPS, str(tmp_path / "b" / "2.ckpt"))
    torch.testing.assert_close(rest, losses[2:], rtol=1e-2, atol=1e-4)
    torch.testing.assert_close(resumed, weights, rtol=0, atol=1e-2)


@pytest.mark.parametrize("place", ["single@1", "fsdp@2"])
def test_a_checkpoint_holds_plain_tensors_by_the_names_of_their_parts(place: str, tmp_path: Path) -> None:
    run(place, "AdamW4bit", str(tmp_path), 2, None)
    checkpoint = open_checkpoint(tmp_path / "2.ckpt")
    found = {
        name: (checkpoint.dtype("optimizer", name), tuple(checkpoint.shape("optimizer", name)))
        for name in checkpoint.names("optimizer")
        if name.endswith("/net.0.weight")
    }
    assert found == {
        f"0/{slot}.{part}/net.0.weight": kind
        for slot in ("exp_avg", "exp_avg_sq")
        for part, kind in {
            "codes": (torch.uint8, (4096,)),
            "scale": (torch.float32, (64,)),
            "qmap": (torch.float32, (16,)),
        }.items()
    }


def refused(out: int) -> str:
    module = QuantizedModel("AdamW8bit", out)
    with pytest.raises(ConfigurationError) as caught:
        silent_trainer(devices=2, strategy="fsdp", max_steps=1).fit(module, data(ROWS // 2))
    assert not module.losses
    return str(caught.value)


def test_fsdp_refuses_a_parameter_that_only_some_ranks_would_quantize() -> None:
    # Three rows on two ranks: 2 x 4224 elements are 33 blocks, and 4224 elements are 16.5 blocks.
    for message in run_on_ranks(2, refused, 3):
        assert message.startswith(
            "AdamW8bit would quantize its state of wide.weight, of shape [3, 4224], on some of 2 ranks only"
        )


class Parallel(QuantizedModel):
    """Splits a layer over ranks."""

    def configure_tensor_parallel(self, mesh: Any) -> dict[str, Any]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {"net.0": ColwiseParallel(), "net.2": RowwiseParallel()}


def refused_split() -> str:
    trainer = silent_trainer(devices=2, strategy=FSDPStrategy(tensor_parallel=2), max_steps=1)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(Parallel("AdamW8bit"), data(ROWS))
    return str(caught.value)


def test_tensor_parallelism_refuses_quantized_state_by_name() -> None:
    for message in run_on_ranks(2, refused_split):
        assert "AdamW8bit quantizes blocks of consecutive elements, which tensor_parallel spreads" in message


class CPUOffloadOptimizer(torch.optim.SGD):
    """Has the name of torchao's, which can only be constructed beside a GPU."""


class Offloaded(QuantizedModel):
    def configure_optimizers(self) -> Any:
        return CPUOffloadOptimizer(self.parameters())


def test_an_optimizer_that_steps_copies_of_the_parameters_is_refused() -> None:
    module = Offloaded("")
    with refuses(ConfigurationError, "CPUOffloadOptimizer"):
        silent_trainer(max_steps=1).fit(module, data(ROWS))
    net = nn.Linear(2, 2)
    with refuses(ConfigurationError, "CPUOffloadOptimizer", "strategy='fsdp-offload'"):
        Fabric("cpu").setup(net, CPUOffloadOptimizer(net.parameters()))


def test_the_memory_of_quantized_state_is_planned() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = optimizer_state(QuantizedModel("_AdamW"), Float32True(), "cpu")
        eighth = optimizer_state(QuantizedModel("AdamW8bit"), Float32True(), "cpu")
    assert eighth.state_bytes < plain.state_bytes / 3
