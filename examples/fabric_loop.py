"""The GPT of ``gpt.py``, trained by a custom loop on Fabric instead of the Trainer.

    python examples/fabric_loop.py
    python examples/fabric_loop.py --strategy ddp --devices 2 --precision bf16-mixed

``accumulate`` determines which micro-batch completes an optimizer step; in all others ``step`` and ``zero_grad`` do
nothing. ``backward`` takes the number of tokens of the micro-batch as its weight. ``gather_for_metrics`` returns every
document of the validation set exactly once, on any number of ranks.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from gpt import (  # type: ignore[import-not-found,unused-ignore]  # beside this file
    GPT,
    arguments,
    cosine_with_warmup,
    load_data,
    num_tokens,
    token_loss,
)

from phalanx import AccumulationSchedule, Fabric
from phalanx.loggers import CSVLogger


@torch.no_grad()
def validate(fabric: Fabric, model: Any, loader: Any, batches: int = 20) -> float:
    """Return the mean loss per token over the first batches of all ranks. Collective."""
    model.eval()
    rows = []
    for index, (tokens, targets) in enumerate(loader):
        if index == batches:
            break
        losses = token_loss(model(tokens), targets, reduction="none").sum(dim=1)
        counts = (targets >= 0).sum(dim=1)
        # Gather the sum of losses and the number of tokens per document: the mean is exact for any sharding.
        rows.append(fabric.gather_for_metrics(torch.stack([losses.double(), counts.double()], dim=1)))
    model.train()
    total, count = torch.cat(rows).sum(dim=0).tolist()
    return float(total / count)


def main() -> None:
    """Train, save, load into a new model, and print a sample of it."""
    options = arguments("Train a small GPT with a custom loop.")
    steps = options.steps
    fabric = Fabric(
        strategy=options.strategy,
        devices=options.devices,
        precision=options.precision,
        accumulate=AccumulationSchedule({0: 1, steps // 2: 2}, unit="step"),
        loggers=CSVLogger(options.out, name="fabric_loop"),
    )
    fabric.launch()
    fabric.seed_everything(1)

    def build() -> GPT:
        return GPT(options.layers, options.width, heads=4, context=options.context)

    plain_model = build()
    plain_optimizer = torch.optim.AdamW(plain_model.parameters(), lr=3e-3, weight_decay=0.01)
    model, optimizer = fabric.setup(plain_model, plain_optimizer)
    scheduler = fabric.setup_scheduler(cosine_with_warmup(plain_optimizer, steps))
    training, validation = fabric.setup_dataloaders(*load_data(options.context, options.batch_size, options.short))

    fabric.print(f"validation loss before: {validate(fabric, model, validation):.4f}")
    step = 0
    while step < steps:
        for batch in training:
            tokens, targets = batch
            with fabric.accumulate(model):
                loss = token_loss(model(tokens), targets)
                fabric.backward(loss, weight=num_tokens(batch))
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not fabric.sync_gradients:
                continue
            step += 1
            if step % max(1, steps // 10) == 0:
                fabric.log("train_loss", loss, step)
                fabric.print(f"step {step}/{steps}: loss {loss.item():.3f}")
            if step == steps:
                break
    after = validate(fabric, model, validation)
    fabric.print(f"validation loss after: {after:.4f}, against {math.log(128):.3f} for guessing")

    path = Path(options.out) / "fabric_loop" / "last.ckpt"
    fabric.save(path, {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": step})
    again = fabric.setup(build())
    state = fabric.load(path, {"model": again})
    fabric.print(f"saved {path} at step {state['step']}; loaded: {validate(fabric, again, validation):.4f}")
    # All ranks generate the text: with sharded weights, every forward pass is collective.
    again.mark_forward_method("sample")
    fabric.print(f"--- sample\n{again.sample(40 if options.short else 200)}")
    fabric.end_training()


if __name__ == "__main__":
    main()
