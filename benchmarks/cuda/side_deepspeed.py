"""DeepSpeed's engine driven by hand, with the config and the optimizer that phalanx gives it."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from phalanx.framework.core.precision import resolve_precision
from phalanx.strategies.deepspeed.arguments import resolve_options
from phalanx.strategies.deepspeed.config import engine_config
from phalanx.strategies.deepspeed.optimizer import engine_optimizer

from .job import Job
from .model import build, compile_blocks, optimizer_of
from .side_raw import join_alone


def fit(job: Job) -> None:
    """Run DeepSpeed's own loop in bf16, with master weights and gradients in fp32."""
    # DeepSpeed chooses the device at its import, and takes the rank from these variables.
    os.environ.update(DS_ACCELERATOR=job.device.type, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    join_alone(job.device)
    deepspeed: Any = import_module("deepspeed")
    options = resolve_options(stage=int(job.strategy[-1]))
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    model = build(job.size, job.device)
    if job.compiled:
        compile_blocks(model)
    optimizer = engine_optimizer(optimizer_of(model, job.size), options)
    elements = sum(parameter.numel() for parameter in model.parameters())
    largest = max(parameter.numel() for parameter in model.parameters())
    config = engine_config(options, resolve_precision("bf16-mixed"), 1, elements, largest)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    for tokens in job.batches:
        job.clock.step()
        loss: torch.Tensor = engine(tokens.to(job.device, non_blocking=True))
        job.clock.keep(loss)
        engine.backward(loss)
        engine.step()
    engine.destroy()
    dist.destroy_process_group()
