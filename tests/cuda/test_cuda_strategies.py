"""One rank on a device, over NCCL where the strategy has a group: fit, resume and evaluate, in each precision."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_machine import EMULATED, needs_gpu
from emulated_fits import Classifier, SaveAt, batches, emulated_trainer, whole_weights
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import seed_everything
from phalanx.strategies import DeepSpeedStrategy
from phalanx.strategies.deepspeed.ops import missing_ops

PLAIN = ["single", "ddp", "fsdp", "hsdp"]
ZERO = ["zero1", "zero2", "zero3"]
OFFLOADED = ["zero2-offload", "zero3-offload", "zero3-nvme"]
# Relative, of a loss near 0.7: bfloat16 has 8 bits, float16 has 11.
TOLERANCES = {"32-true": 1e-4, "bf16-mixed": 3e-2, "bf16-true": 5e-2, "16-mixed": 1e-2, "fp8": 1e-1}
STEPS = 6


class Evaluated(Classifier):
    """The same model, with a validation loss."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        loss = nn.functional.cross_entropy(self.head(self.blocks(batch[0])).float(), batch[1])
        self.log("val_loss", loss)


def strategy_of(name: str, root: str) -> Any:
    return DeepSpeedStrategy(stage=3, offload_optimizer="nvme", nvme_path=root) if name == "zero3-nvme" else name


def trainer_for(name: str, precision: str, root: str) -> Any:
    return emulated_trainer(
        1,
        strategy=strategy_of(name, root),
        precision=precision,
        max_steps=STEPS,
        callbacks=[SaveAt(f"{root}/saved")],
        enable_checkpointing=None,
        default_root_dir=root,
        # Of emulated devices, layers cannot be run in this mode.
        inference_mode=not EMULATED,
    )


def data_of(precision: str) -> list[tuple[Tensor, ...]]:
    """Return micro-batches of 4 rows, or of 16: matrix products in fp8 need multiples of 16."""
    if precision != "fp8":
        return [*batches(STEPS)]
    parts = batches(4 * STEPS)
    return [tuple(map(torch.cat, zip(*parts[at : at + 4], strict=True))) for at in range(0, len(parts), 4)]


def fitted(name: str, precision: str, root: str) -> dict[str, Any]:
    """Fit, resume from the middle, and evaluate; return the losses, the metric, and both runs' weights."""
    seed_everything(5)
    whole = Evaluated(dropout=0.1)
    trainer = trainer_for(name, precision, f"{root}/whole")
    trainer.fit(whole, data_of(precision), data_of(precision))
    (metrics,) = trainer.validate(whole, data_of(precision), verbose=False)
    weights = whole_weights(whole)
    seed_everything(6)
    resumed = Evaluated(dropout=0.1)
    again = trainer_for(name, precision, f"{root}/again")
    again.fit(resumed, data_of(precision), data_of(precision), ckpt_path=f"{root}/whole/saved/step=3.ckpt")
    return {
        "steps": (trainer.global_step, again.global_step),
        "losses": whole.losses(),
        "resumed losses": resumed.losses(),
        "metrics": metrics,
        "weights": weights,
        "resumed": whole_weights(resumed),
        "devices": sorted({str(loss.device) for loss in whole.kept}),
    }


def on_cpu(precision: str) -> list[float]:
    module = Classifier()
    silent_trainer(devices=1, max_steps=STEPS).fit(module, data_of(precision))
    return module.losses()


def on_device(name: str, precision: str, root: str) -> list[float]:
    module = Classifier()
    emulated_trainer(1, strategy=strategy_of(name, root), precision=precision, max_steps=STEPS).fit(
        module, data_of(precision)
    )
    return module.losses()


def skip_without_tools(name: str) -> None:
    if name == "zero3-nvme" and missing_ops(["async_io"], "cuda"):
        pytest.skip("async_io of DeepSpeed is not built: see ops.log of run_cuda_tests.py")


def cases() -> list[Any]:
    pairs = [(name, precision) for precision in ("32-true", "bf16-mixed") for name in [*PLAIN, *ZERO]]
    pairs += [(name, "bf16-true") for name in ("single", "ddp", "fsdp", "zero2")]
    pairs += [(name, "16-mixed") for name in ("single", "ddp", "fsdp")]
    found = [pytest.param(*pair, marks=pytest.mark.deepspeed if "zero" in pair[0] else ()) for pair in pairs]
    needs_ops = needs_gpu("ops of DeepSpeed that are built for CUDA")
    found += [pytest.param(name, "bf16-mixed", marks=[pytest.mark.deepspeed, needs_ops]) for name in OFFLOADED]
    fp8 = needs_gpu("fp8 matrix products")
    return found + [pytest.param(name, "fp8", marks=fp8) for name in ("single", "ddp", "fsdp")]


@pytest.mark.parametrize(("name", "precision"), cases())
@pytest.mark.timeout(240)
def test_a_fit_resumes_bit_for_bit_and_is_evaluated(name: str, precision: str, tmp_path: Path) -> None:
    skip_without_tools(name)
    (found,) = run_on_ranks(1, fitted, name, precision, str(tmp_path), device="cuda", timeout=220.0)
    assert found["steps"] == (STEPS, STEPS)
    assert found["devices"] == ["cuda:0"]
    assert math.isfinite(found["metrics"]["val_loss"])
    assert found["resumed losses"] == found["losses"][3:]
    assert found["weights"]
    differing = {
        key: (weight.double() - found["resumed"][key].double()).abs().max().item()
        for key, weight in found["weights"].items()
        if not torch.equal(weight, found["resumed"][key])
    }
    assert differing == {}, "the largest difference of each weight that differs"


@pytest.mark.parametrize(("name", "precision"), cases())
@pytest.mark.timeout(240)
def test_the_losses_are_those_of_the_cpu(name: str, precision: str, tmp_path: Path) -> None:
    skip_without_tools(name)
    (expected,) = run_on_ranks(1, on_cpu, precision)
    (losses,) = run_on_ranks(1, on_device, name, precision, str(tmp_path), device="cuda", timeout=220.0)
    assert losses == pytest.approx(expected, rel=TOLERANCES[precision])


def fused_weights() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights after a fit with the fused and with the default form of AdamW."""

    found = []
    for name in ("fused", "adamw"):
        module = Classifier(optimizer=name)
        emulated_trainer(1, max_steps=STEPS).fit(module, batches(STEPS))
        found.append(whole_weights(module))
    return found[0], found[1]


def test_the_fused_form_of_adamw_computes_the_same() -> None:
    ((fused, default),) = run_on_ranks(1, fused_weights, device="cuda")
    for name, weight in fused.items():
        torch.testing.assert_close(weight, default[name], rtol=1e-3, atol=1e-4)
