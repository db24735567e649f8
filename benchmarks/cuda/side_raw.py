"""The loop in plain torch, alone, under DistributedDataParallel or under ``fully_shard``, on one rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from .job import Job
from .model import LanguageModel, build, compile_blocks, optimizer_of


def fit(job: Job) -> None:
    """Run the loop under bf16 autocast; ``fsdp`` computes in bf16 parameters, and reduces gradients in fp32."""
    model = build(job.size, job.device)
    if job.compiled:
        compile_blocks(model)
    module = _wrapped(model, job)
    optimizer = optimizer_of(module, job.size)
    for tokens in job.batches:
        job.clock.step()
        tokens = tokens.to(job.device, non_blocking=True)
        with torch.autocast(job.device.type, torch.bfloat16):
            loss = module(tokens)
        job.clock.keep(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.is_initialized():
        dist.destroy_process_group()


def _wrapped(model: LanguageModel, job: Job) -> nn.Module:
    if job.strategy == "single":
        return model
    join_alone(job.device)
    if job.strategy == "ddp":
        return DistributedDataParallel(model, device_ids=[0] if job.device.type == "cuda" else None)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.gpt.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def join_alone(device: torch.device) -> None:
    """Start a process group with this process as its one rank, without a port."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
