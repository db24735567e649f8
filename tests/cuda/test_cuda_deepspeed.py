"""DeepSpeed on devices: its ops for CUDA beside those for the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from cuda_machine import needs_gpu
from emulated_fits import Classifier, batches, emulated_trainer
from models import silent_trainer
from ranks import run_on_ranks

pytestmark = pytest.mark.deepspeed


def losses_of(accelerator: str) -> tuple[list[float], dict[str, str]]:
    from deepspeed.ops.op_builder.builder import OpBuilder

    module = Classifier()
    make: Any = emulated_trainer if accelerator == "cuda" else silent_trainer
    trainer = make(devices=1, strategy="zero2-offload", max_steps=5, accelerator=accelerator)
    trainer.fit(module, batches(6))
    return module.losses(), {name: str(getattr(op, "__file__", op)) for name, op in OpBuilder._loaded_ops.items()}


@needs_gpu("ops of DeepSpeed that are built for CUDA")
@pytest.mark.timeout(300)
def test_ops_for_cuda_and_for_the_cpu_are_used_side_by_side() -> None:
    # Ranks without the group of the tests, which have seen no device yet, come first.
    ((first, cpu_ops),) = run_on_ranks(1, losses_of, "cpu", device="cpu", timeout=130.0)
    ((second, cuda_ops),) = run_on_ranks(1, losses_of, "cuda", device="cuda", timeout=130.0)
    assert second == pytest.approx(first, rel=1e-2)
    assert {"cpu_adam"} <= cpu_ops.keys() & cuda_ops.keys()
    assert cpu_ops["cpu_adam"] != cuda_ops["cpu_adam"]


CYCLES = 200_000_000


def read_in_order() -> tuple[float, float]:
    import torch

    from phalanx.strategies.deepspeed.stages import OrderedStream

    written = torch.zeros(1, device="cuda")
    stream = OrderedStream.of(torch.cuda.Stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        written.fill_(1.0)
    stream.synchronize()
    first = written.clone()
    torch.cuda._sleep(CYCLES)
    written.fill_(2.0)
    stream.follow()
    with torch.cuda.stream(stream):
        second = torch.empty(1, device="cuda").copy_(written)
    torch.cuda.synchronize()
    return first.item(), second.item()


@needs_gpu("kernels of two streams that run side by side")
@pytest.mark.timeout(120)
def test_work_on_reduced_gradients_begins_after_their_reduction() -> None:
    assert run_on_ranks(1, read_in_order, device="cuda") == [(1.0, 2.0)]
