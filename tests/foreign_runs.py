"""Trains the model of ``foreign_model`` with another library, saves in the middle and goes on.

Run as ``python foreign_runs.py FOLDER``, once for each rank with the variables of torchrun. The checkpoint of a kind is
``FOLDER/<kind>``; the losses after it, averaged over ranks, are in ``FOLDER/<kind>.json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from foreign_model import (
    FOLLOWING,
    GLOBAL_BATCH,
    NUM_BATCHES,
    SAVED_AFTER,
    global_batch,
    loss_of,
    optimizer_of,
    schedule_of,
    seeded_net,
)
from torch import Tensor
from torch.utils.data import DataLoader

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
ALL_STEPS = SAVED_AFTER + FOLLOWING


def averaged(losses: list[float]) -> list[float]:
    """Return losses averaged over ranks."""
    values = torch.tensor(losses, dtype=torch.float64)
    if WORLD_SIZE > 1:
        dist.all_reduce(values)
    means: list[float] = (values / WORLD_SIZE).tolist()
    return means


def by_hand(step: Callable[[Any], Tensor], save: Callable[[], None]) -> list[float]:
    """Train, save, and return the losses that follow."""
    losses = []
    for number in range(ALL_STEPS):
        if number == SAVED_AFTER:
            save()
        losses.append(step(global_batch(number, RANK, WORLD_SIZE)).item())
    return averaged(losses)[SAVED_AFTER:]


# ---- Lightning ------------------------------------------------------------------------------------------------------


def lightning_fit(
    target: Path, groups: bool, prepare: Callable[[Any], None] | None, averaging: Sequence[Any] = (), **arguments: Any
) -> list[float]:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(LightningModule):
        def __init__(self, groups: bool = groups) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = seeded_net()
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if prepare is not None:
                prepare(self)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = loss_of(self.net, batch)
            self.losses.append(loss.item())
            return loss

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"words": ["a", "b"]}

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self, self.hparams["groups"])
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule_of(optimizer), "interval": "step"},
            }

    model = Model()
    saver = ModelCheckpoint(
        dirpath=target.parent / "saves", filename=target.name, every_n_train_steps=SAVED_AFTER, save_top_k=-1,
        enable_version_counter=False, auto_insert_metric_name=False,
    )  # fmt: skip
    saver.FILE_EXTENSION = ""
    saver.filename = target.name + "-{step}"
    trainer = Trainer(
        accelerator="cpu", max_steps=ALL_STEPS, logger=False, callbacks=[*averaging, saver], enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=target.parent, use_distributed_sampler=False, **arguments,
    )  # fmt: skip
    batches: Any = [global_batch(number, RANK, WORLD_SIZE) for number in range(NUM_BATCHES)]
    trainer.fit(model, DataLoader(batches, batch_size=None))
    if RANK == 0:
        (target.parent / "saves" / f"{target.name}-{SAVED_AFTER}").rename(target)
    return averaged(model.losses)[SAVED_AFTER:]


def lightning(target: Path) -> list[float]:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    averaging = [EMAWeightAveraging(decay=0.5)]
    return lightning_fit(target, False, None, devices=WORLD_SIZE, strategy="ddp", averaging=averaging)


def lightning_sharded(target: Path) -> list[float]:
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    strategy = ModelParallelStrategy(data_parallel_size=WORLD_SIZE, tensor_parallel_size=1)
    return lightning_fit(
        target, True, lambda model: fully_shard(model.net, mesh=model.device_mesh["data_parallel"]), devices=WORLD_SIZE,
        strategy=strategy,
    )  # fmt: skip


def lightning_deepspeed(target: Path) -> list[float]:
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import DeepSpeedStrategy, deepspeed

    # It refuses a CPU, on which DeepSpeed runs well.
    vars(deepspeed).update(CUDAAccelerator=CPUAccelerator, _validate_device_index_selection=lambda devices: None)

    class OnCPU(DeepSpeedStrategy):
        root_device = torch.device("cpu", 0)

    config = {key: value for key, value in zero_config(2).items() if "gradient" not in key}
    strategy = OnCPU(config=config, process_group_backend="gloo")
    return lightning_fit(target, True, None, devices=WORLD_SIZE, strategy=strategy)


# ---- Accelerate -----------------------------------------------------------------------------------------------------


def accelerate(target: Path) -> list[float]:
    from accelerate import Accelerator

    # Else the schedule is stepped once for each process.
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    net = seeded_net()
    optimizer = optimizer_of(net, True)
    model, own, schedule = accelerator.prepare(net, optimizer, schedule_of(optimizer))

    def step(batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        own.step()
        schedule.step()
        own.zero_grad()
        return loss

    return by_hand(step, lambda: accelerator.save_state(str(target)))


def accelerate_sharded(target: Path) -> list[float]:
    from types import SimpleNamespace

    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin, save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.fsdp import fully_shard

    PartialState(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator: Any = SimpleNamespace(process_index=RANK, num_processes=WORLD_SIZE, is_fsdp2=True)
    net: Any = fully_shard(seeded_net())
    optimizer = optimizer_of(net, True)

    def step(batch: Any) -> Tensor:
        loss = loss_of(net, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def save() -> None:
        # What save_state calls under FSDP; an Accelerator itself takes no FSDP on a CPU.
        save_fsdp_model(plugin, accelerator, net, str(target), 0)
        save_fsdp_optimizer(plugin, accelerator, optimizer, net, str(target), 0)

    return by_hand(step, save)


# ---- DeepSpeed ------------------------------------------------------------------------------------------------------


def zero_config(stage: int, dtype: str = "fp32") -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // WORLD_SIZE,
        "gradient_accumulation_steps": 1,
        # Left out, it is 1.
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def deepspeed_fit(
    target: Path, stage: int, dtype: str = "fp32", save: Callable[[Any, Path], None] | None = None
) -> list[float]:
    import deepspeed

    deepspeed.init_distributed("gloo")
    net = seeded_net()
    optimizer = optimizer_of(net, True)
    engine, _, _, _ = deepspeed.initialize(
        model=net, optimizer=optimizer, config=zero_config(stage, dtype), lr_scheduler=schedule_of(optimizer)
    )

    def step(batch: Any) -> Tensor:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    def save_own() -> None:
        if save is not None:
            save(engine, target)
        else:
            engine.save_checkpoint(str(target), client_state={"mine": {"words": ["a", "b"]}})

    losses = by_hand(step, save_own)
    engine.destroy()
    return losses


def accelerate_deepspeed(target: Path) -> list[float]:
    def save(engine: Any, target: Path) -> None:
        # As Accelerator.save_state does under DeepSpeed: the engine's part in a folder, the rest beside it.
        from accelerate import PartialState
        from accelerate.checkpointing import save_accelerator_state

        PartialState(cpu=True)
        target.mkdir(exist_ok=True)
        engine.save_checkpoint(str(target), "pytorch_model")
        save_accelerator_state(str(target), [], [], [], [], RANK, SAVED_AFTER)

    return deepspeed_fit(target, 1, save=save)


KINDS: dict[str, Callable[[Path], list[float]]] = {
    "lightning": lightning,
    "lightning-sharded": lightning_sharded,
    "lightning-deepspeed": lightning_deepspeed,
    "accelerate": accelerate,
    "accelerate-sharded": accelerate_sharded,
    "accelerate-deepspeed": accelerate_deepspeed,
    **{f"zero{stage}": partial(deepspeed_fit, stage=stage) for stage in (0, 3)},
}


def main(folder: Path) -> None:
    from deepspeed.ops import __compatible_ops__ as compatible_ops

    # Would be compiled, for DeepSpeed's inference alone.
    compatible_ops["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=RANK, world_size=WORLD_SIZE)
    for kind, run in KINDS.items():
        losses = run(folder / kind)
        if RANK == 0:
            (folder / f"{kind}.json").write_text(json.dumps(losses))
    dist.barrier()
    # Libraries leave threads that end with the process only.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
