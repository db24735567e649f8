"""The sides of all comparisons. Each is written as the documentation of its library shows, and returns the trained net.

The libraries are imported by their sides, so that the start of each can be measured by itself.
"""

from __future__ import annotations

import csv
import logging
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from .task import LOG_EVERY, VALIDATION_BATCHES, Batch, Job, build, loader_of, optimizer_of

PATIENCE = 10**6
"""Of early stopping, which is to watch and not to stop."""


# ---- plain torch, and loops by hand ----------------------------------------------------------------------------------


@dataclass
class Everyday:
    """The logging and saving of a hand-written loop."""

    log: Callable[[dict[str, Any], int], object]
    save: Callable[[str], object]


def loop(
    job: Job,
    model: Any,
    loader: Iterable[Any],
    validation: Iterable[Any],
    forward: Callable[[Any], Tensor],
    update: Callable[[Tensor], object],
    everyday: Everyday,
) -> None:
    """Run the loop that users of torch, Fabric and Accelerate write.

    Args:
        forward: returns the loss of a batch.
        update: runs the backward pass and the optimizer's step.
        everyday: the features of everyday fits.
    """
    count, best, waited = 0, math.inf, 0
    kept: dict[str, Tensor] = {}
    for epoch in range(job.epochs):
        for batch in loader:
            job.mark()
            loss = forward(batch)
            if job.keep is not None:
                job.keep(loss)
            update(loss)
            count += 1
            if job.everyday:
                everyday.log({"loss": loss.item()}, count)
            if job.values:
                for value in range(job.values):
                    kept[f"value_{value}"] = loss.detach()
                if count % LOG_EVERY == 0:
                    everyday.log(dict(zip(kept, torch.stack(list(kept.values())).tolist(), strict=True)), count)
        if job.everyday:
            model.eval()
            with torch.no_grad():
                mean = sum(forward(batch).item() for batch in validation) / VALIDATION_BATCHES
            model.train()
            everyday.log({"val_loss": mean}, count)
            everyday.save(str(job.directory / f"epoch-{epoch}.ckpt"))
            best, waited = (mean, 0) if mean < best else (best, waited + 1)
            if waited >= PATIENCE:
                break


class Table:
    """Rows of a CSV file, for sides without a logger of their own."""

    def __init__(self, job: Job) -> None:
        self._file = (job.directory / "metrics.csv").open("w", newline="") if job.everyday or job.values else None
        names = ["step", "loss", "val_loss", *(f"value_{value}" for value in range(job.values))]
        self._writer = csv.DictWriter(self._file, names) if self._file else None
        if self._writer:
            self._writer.writeheader()

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Write a row."""
        assert self._writer is not None
        self._writer.writerow({"step": step, **values})

    def close(self) -> None:
        """Write all rows to the disk's cache."""
        if self._file:
            self._file.close()


def join(job: Job) -> None:
    """Start a process group: of the ranks of torchrun, or of this process alone, without a port."""
    if not dist.is_initialized():
        backend = "nccl" if job.device == "cuda" else "gloo"
        alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
        dist.init_process_group(backend, **({} if job.ranks > 1 else alone))


def raw(job: Job) -> nn.Module:
    """Plain torch: alone, under ``DistributedDataParallel`` or under ``fully_shard``."""
    net, device = build(job), torch.device(job.device)
    if job.compiled:
        compile_blocks(net)
    model = _wrapped(net, job)
    optimizer = optimizer_of(model, job)
    loader, validation = loader_of(job), loader_of(job, VALIDATION_BATCHES)
    if job.ranks > 1:
        loader = _of_rank(loader)

    def forward(batch: Batch) -> Tensor:
        loss: Tensor = model(batch)
        return loss

    def forward_in_bf16(batch: Batch) -> Tensor:
        moved = tuple(tensor.to(device, non_blocking=True) for tensor in batch)
        with torch.autocast(device.type, torch.bfloat16):
            return forward(moved)

    def update(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    passed = 0

    def update_in_windows(loss: Tensor) -> None:
        nonlocal passed
        (loss / job.accumulate).backward()
        passed += 1
        if passed % job.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()

    def save(path: str) -> None:
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)

    table = Table(job)
    passes = forward if job.precision == "32-true" else forward_in_bf16
    updates = update if job.accumulate == 1 else update_in_windows
    loop(job, model, loader, validation, passes, updates, Everyday(table.log, save))
    table.close()
    return net


def _of_rank(loader: Any) -> Any:
    sampler: Any = DistributedSampler(loader.dataset, shuffle=False)
    return torch.utils.data.DataLoader(loader.dataset, loader.batch_size, sampler=sampler, collate_fn=loader.collate_fn)


def _wrapped(net: nn.Module, job: Job) -> nn.Module:
    strategy = {"auto": "ddp" if job.ranks > 1 else "single"}.get(job.strategy, job.strategy)
    if strategy == "single":
        return net
    join(job)
    if strategy == "ddp":
        return DistributedDataParallel(net, device_ids=[0] if job.device == "cuda" else None)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    policy = MixedPrecisionPolicy() if job.precision == "32-true" else bf16
    blocks: Any = net.blocks
    for block in blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    return net


def compile_blocks(net: Any) -> None:
    """Compile each block, as ``Trainer(compile="blocks")`` does."""
    for index, block in enumerate(net.blocks):
        # The result has the hooks of DDP and FSDP outside of the compiled code.
        net.blocks[index] = torch.compile(block)


def lightning_fabric(job: Job) -> nn.Module:
    """Lightning's Fabric."""
    library: Any = import_module("lightning.fabric")
    loggers = [import_module("lightning.fabric.loggers").CSVLogger(job.directory)] if job.everyday else []
    ends = [logger.finalize for logger in loggers]
    return _with_fabric(
        job, library.Fabric, {"loggers": loggers}, compile_blocks, lambda _: [end("success") for end in ends]
    )


def phalanx_fabric(job: Job) -> nn.Module:
    """The Fabric of phalanx."""
    library = import_module("phalanx")
    own = {"loggers": [import_module("phalanx.loggers").CSVLogger(job.directory)] if job.everyday else []}
    return _with_fabric(
        job, library.Fabric, own | {"compile": "blocks" if job.compiled else False}, None, lambda it: it.end_training()
    )


def _with_fabric(
    job: Job,
    kind: Any,
    own: dict[str, Any],
    compiles: Callable[[Any], None] | None,
    ends: Callable[[Any], object],
) -> nn.Module:
    strategy = "auto" if job.strategy == "single" else job.strategy
    fabric = kind(
        accelerator=job.device, devices=job.ranks, strategy=_parallel(job, strategy), precision=job.precision, **own
    )
    fabric.launch()
    net = build(job)
    if compiles and job.compiled:
        compiles(net)
    model, optimizer = fabric.setup(net, optimizer_of(net, job))
    loader, validation = fabric.setup_dataloaders(loader_of(job), loader_of(job, VALIDATION_BATCHES))

    def update(loss: Tensor) -> None:
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def save(path: str) -> None:
        fabric.save(path, {"model": model, "optimizer": optimizer})

    loop(job, model, loader, validation, model, update, Everyday(fabric.log_dict, save))
    ends(fabric)
    return net


def accelerate(job: Job) -> nn.Module:
    """Accelerate. It has no logger for CSV files."""
    kind: Any = import_module("accelerate").Accelerator
    accelerator = kind(cpu=job.device == "cpu", mixed_precision="no" if job.precision == "32-true" else "bf16")
    net = build(job)
    if job.compiled:
        compile_blocks(net)
    model, optimizer, loader, validation = accelerator.prepare(
        net, optimizer_of(net, job), loader_of(job), loader_of(job, VALIDATION_BATCHES)
    )

    def update(loss: Tensor) -> None:
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    table = Table(job)
    loop(job, model, loader, validation, model, update, Everyday(table.log, accelerator.save_state))
    table.close()
    accelerator.free_memory()
    return net


# ---- loops of the library --------------------------------------------------------------------------------------------


def ignite(job: Job) -> nn.Module:
    """pytorch-ignite: the engine and handlers of its guide. It has no handler for CSV files."""
    engines, handlers = import_module("ignite.engine"), import_module("ignite.handlers")
    if job.ranks > 1:
        join(job)
    idist: Any = import_module("ignite.distributed")
    net, device = build(job), torch.device(job.device)
    if job.compiled:
        compile_blocks(net)
    model = idist.auto_model(net) if job.ranks > 1 else net
    optimizer = optimizer_of(net, job)
    loader = _of_rank(loader_of(job)) if job.ranks > 1 else loader_of(job)
    mixed, convert = job.precision != "32-true", import_module("ignite.utils").convert_tensor

    def forward(batch: Any) -> Tensor:
        if not mixed:
            loss: Tensor = model(batch)
            return loss
        with torch.autocast(device.type, torch.bfloat16):
            return model(convert(batch, device=device, non_blocking=True))  # type: ignore[no-any-return]

    def train_step(engine: Any, batch: Any) -> Any:
        job.mark()
        model.train()
        optimizer.zero_grad()
        loss = forward(batch)
        if job.keep is not None:
            job.keep(loss)
        loss.backward()
        optimizer.step()
        return loss if mixed else loss.item()

    def validation_step(engine: Any, batch: Any) -> float:
        model.eval()
        with torch.no_grad():
            return forward(batch).item()

    trainer, table = engines.Engine(train_step), Table(job)
    if job.everyday:
        evaluator, completed = engines.Engine(validation_step), engines.Events.EPOCH_COMPLETED
        import_module("ignite.metrics").Average().attach(evaluator, "val_loss")
        validation = loader_of(job, VALIDATION_BATCHES)

        @trainer.on(engines.Events.ITERATION_COMPLETED)  # type: ignore[untyped-decorator]
        def log_loss(engine: Any) -> None:
            table.log({"loss": engine.state.output}, engine.state.iteration)

        @trainer.on(completed)  # type: ignore[untyped-decorator]
        def validate(engine: Any) -> None:
            evaluator.run(validation)
            table.log({"val_loss": evaluator.state.metrics["val_loss"]}, engine.state.iteration)

        saver = handlers.ModelCheckpoint(job.directory, "kept", n_saved=None)
        trainer.add_event_handler(completed, saver, {"model": net, "optimizer": optimizer})
        stopper = handlers.EarlyStopping(PATIENCE, lambda engine: -engine.state.metrics["val_loss"], trainer)
        evaluator.add_event_handler(engines.Events.COMPLETED, stopper)
    trainer.run(loader, max_epochs=job.epochs)
    table.close()
    return net


def lightning(job: Job) -> nn.Module:
    """Lightning's Trainer."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    library: Any = import_module("lightning.pytorch")
    loggers: Any = import_module("lightning.pytorch.loggers")
    module = task_class(library.LightningModule)(job)
    if job.compiled:
        compile_blocks(module.net)
    settings, given = _settings(job, library.callbacks, loggers), _loaders(job)
    if job.ranks > 1:
        # Its own sampler shuffles.
        settings, given = settings | {"use_distributed_sampler": False}, (_of_rank(given[0]),)
    library.Trainer(**settings).fit(module, *given)
    net: nn.Module = module.net
    return net


def phalanx(job: Job) -> nn.Module:
    """The Trainer of phalanx, with the settings of Lightning's and all its guards."""
    library: Any = import_module("phalanx")
    callbacks, loggers = import_module("phalanx.callbacks"), import_module("phalanx.loggers")
    module = task_class(library.TrainModule)(job)
    settings = _settings(job, callbacks, loggers)
    trainer = library.Trainer(**settings, compile="blocks" if job.compiled else False)
    trainer.fit(module, *_loaders(job))
    net: nn.Module = module.net
    return net


def task_class(base: Any) -> Any:
    """Return the task as a subclass of ``TrainModule`` or ``LightningModule``: their methods have the same names."""

    class Task(base):  # type: ignore[misc]
        def __init__(self, job: Job) -> None:
            super().__init__()
            self.net, self.job = build(job), job

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            self.job.mark()
            loss: Tensor = self.net(batch)
            if self.job.keep is not None:
                self.job.keep(loss)
            if self.job.everyday:
                self.log("loss", loss)
            for value in range(self.job.values):
                self.log(f"value_{value}", loss)
            return loss

        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            self.log("val_loss", self.net(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self, self.job)

    return Task


def _loaders(job: Job) -> tuple[Any, ...]:
    return (loader_of(job), loader_of(job, VALIDATION_BATCHES)) if job.everyday else (loader_of(job),)


def _parallel(job: Job, strategy: str) -> Any:
    """Return a strategy, with its settings if there are any."""
    if strategy == "zero3-nvme":
        nvme = {"offload_optimizer": "nvme", "offload_parameters": "nvme", "nvme_path": job.directory}
        return import_module("phalanx.strategies").DeepSpeedStrategy(stage=3, **nvme)
    if job.options:
        return import_module("phalanx.strategies").DeepSpeedStrategy(stage=int(strategy[-1]), config=dict(job.options))
    return strategy


def _settings(job: Job, callbacks: Any, loggers: Any) -> dict[str, Any]:
    """Return the arguments of both Trainers."""
    found: list[Any] = []
    if job.everyday:
        found = [
            callbacks.EarlyStopping(monitor="val_loss", patience=PATIENCE),
            callbacks.ModelCheckpoint(dirpath=str(job.directory / "kept"), save_top_k=-1),
        ]
    strategy = "auto" if job.strategy == "single" else job.strategy
    return {
        "max_epochs": job.epochs,
        "accelerator": job.device,
        "devices": job.ranks,
        "strategy": _parallel(job, strategy),
        "precision": job.precision,
        "accumulate_grad_batches": job.accumulate,
        "callbacks": found,
        "logger": loggers.CSVLogger(str(job.directory)) if job.everyday or job.values else False,
        "log_every_n_steps": 1 if job.everyday else LOG_EVERY,
        "enable_checkpointing": job.everyday,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(job.directory),
    }


def deepspeed(job: Job) -> nn.Module:
    """DeepSpeed's engine driven by hand, with the config and the optimizer that phalanx gives it."""
    # DeepSpeed chooses the device at its import, and takes the rank from these variables.
    alone = {} if job.ranks > 1 else {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(DS_ACCELERATOR=job.device, **alone)
    join(job)
    from phalanx.framework.core.precision import resolve_precision
    from phalanx.strategies.deepspeed.arguments import resolve_options
    from phalanx.strategies.deepspeed.config import engine_config
    from phalanx.strategies.deepspeed.optimizer import engine_optimizer

    library: Any = import_module("deepspeed")
    library.init_distributed(dist_init_required=False, verbose=False)
    options = resolve_options(stage=int(job.strategy[-1]))
    net = build(job)
    if job.compiled:
        compile_blocks(net)
    sizes = [parameter.numel() for parameter in net.parameters()]
    precision = resolve_precision(job.precision)
    config = engine_config(options, precision, dist.get_world_size(), sum(sizes), max(sizes))
    optimizer = engine_optimizer(optimizer_of(net, job), options)
    engine, *_ = library.initialize(model=net, optimizer=optimizer, config=config, dist_init_required=False)
    loader = _of_rank(loader_of(job)) if job.ranks > 1 else loader_of(job)

    def forward(batch: Batch) -> Tensor:
        loss: Tensor = engine(tuple(tensor.to(job.device, non_blocking=True) for tensor in batch))
        return loss

    def update(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    loop(job, engine, loader, [], forward, update, Everyday(Table(job).log, engine.save_checkpoint))
    engine.destroy()
    return net


# ---- running them ----------------------------------------------------------------------------------------------------

SIDES: dict[str, Callable[[Job], nn.Module]] = {
    "raw": raw,
    "phalanx": phalanx,
    "phalanx Fabric": phalanx_fabric,
    "Fabric": lightning_fabric,
    "ignite": ignite,
    "Accelerate": accelerate,
    "Lightning": lightning,
}
ALL = {**SIDES, "DeepSpeed": deepspeed}
LIBRARIES = {
    "Fabric": "lightning",
    "ignite": "ignite",
    "Accelerate": "accelerate",
    "Lightning": "lightning",
    "DeepSpeed": "deepspeed",
}


def missing(side: str) -> str:
    """Return the library of a side if it is not installed; else an empty text."""
    library = LIBRARIES.get(side, "")
    return library if library and find_spec(library) is None else ""


def run(side: str, job: Job) -> nn.Module:
    """Fit a job in a new directory, without output; return the trained net."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, unseen():
        net = ALL[side](replace(job, directory=Path(directory)))
        if job.everyday:
            _check_everyday(Path(directory), job)
        return net


def _check_everyday(directory: Path, job: Job) -> None:
    """Check that a fit has left a row for each step and epoch, and a checkpoint for each epoch."""
    with next(directory.rglob("metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    losses, means = (sum(bool(row[name]) for row in rows) for name in ("loss", "val_loss"))
    saved = [path for kind in ("*.ckpt", "*.pt") for path in directory.rglob(kind)]
    assert (losses, means, len(saved)) == (job.steps * job.epochs, job.epochs, job.epochs), (losses, means, saved)


@contextmanager
def unseen() -> Iterator[None]:
    """Drop the output of a fit."""
    kept = sys.stdout, sys.stderr
    with open(os.devnull, "w") as sink:
        sys.stdout = sys.stderr = sink
        try:
            yield
        finally:
            sys.stdout, sys.stderr = kept


def ends_as_raw(side: str, job: Job) -> None:
    """Raise an error if a side does not end with the weights of the raw loop."""
    own = replace(job, steps=24, epochs=2 if job.everyday else 1)
    found = run(side, own).state_dict()
    expected = run("raw", Job(24, own.epochs, model=job.model, ranks=job.ranks)).state_dict()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=1e-5, msg=lambda text: f"{side}: {text}")
