"""The table of adapters: a model of the size of GPT-2, tuned by LoRA from a folder under every strategy.

It is printed by ``python tests/pretrained_table.py --lora``. A row loads the folder, adds adapters, trains some steps,
saves a checkpoint and writes the merged model. Its losses are compared with those of a plain loop with peft, and the
logits of the merged folder, opened by transformers, with those of the loop's model.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from hf_models import tensor_parallel_plan, train_plain
from models import silent_trainer
from pretrained_table import MEBIBYTE, counted_until_loaded, loader, logits_of, strategy_of, write_folder
from ranks import close_pools, run_on_ranks
from torch import Tensor

from phalanx import TrainModule, hf

LEARNING_RATE = 1e-3
ROWS = {"single": 1, "ddp": 2, "fsdp": 2, "zero3": 2, "fsdp+tp": 2}
"""How many ranks each strategy trains on."""


@dataclass
class Tuned:
    """One rank's losses, the bytes of its peak of tensors until the weights are loaded, and those of the checkpoint."""

    losses: list[float]
    tensors: int
    checkpoint: int


def with_adapters(base: Any) -> Any:
    """Return a GPT-2 with adapters, the same in every process."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    return get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True))


def optimizer_of(module: Any) -> torch.optim.Optimizer:
    """Return the optimizer of the adapters."""
    return torch.optim.AdamW((one for one in module.parameters() if one.requires_grad), lr=LEARNING_RATE)


class Adapted(TrainModule):
    """The model, whose checkpoints hold the adapters alone."""

    save_frozen = False

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        super().__init__()
        self.folder, self.checkpoint = folder, checkpoint
        self.net: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        base = cast(Any, AutoModelForCausalLM).from_config(AutoConfig.from_pretrained(self.folder))
        self.load_pretrained(self.folder, into=base)
        self.net = with_adapters(base)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)

    def configure_tensor_parallel(self, mesh: Any) -> dict[str, Any]:
        plan = tensor_parallel_plan("gpt2")
        return {name.replace("net.", "net.base_model.model."): style for name, style in plan.items()}

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(self.checkpoint)


def tuned(name: str, ranks: int, folder: Path, out: Path, steps: int, length: int) -> Tuned:
    """Tune on one rank; write the checkpoint and the merged folder."""
    module = Adapted(folder, out / "checkpoint")
    trainer = silent_trainer(strategy=strategy_of(name), devices=ranks, max_steps=steps)
    with counted_until_loaded() as memory:
        trainer.fit(module, loader(trainer.fabric.world.data_size, steps, length))
    hf.save_adapter(trainer, out / "merged", merge=True)
    files = [path for path in (out / "checkpoint").rglob("*") if path.is_file()]
    return Tuned(module.losses, memory.peak, sum(path.stat().st_size for path in files))


def by_hand(folder: Path, steps: int, length: int) -> tuple[list[float], Tensor, int]:
    """Return the losses of a plain loop, the logits of its model, and the bytes of its adapters."""
    from transformers import AutoModelForCausalLM

    model = with_adapters(AutoModelForCausalLM.from_pretrained(folder))
    model.train()
    losses = train_plain(model, optimizer_of(model), loader(1, steps, length))
    trained = sum(one.numel() * one.element_size() for one in model.parameters() if one.requires_grad)
    return losses, logits_of(model, length), trained


def table(names: list[str], steps: int, length: int, layers: int, width: int) -> None:
    """Print the rows."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        write_folder(root / "given", layers, width)
        losses, logits, trained = by_hand(root / "given", steps, length)
        size = sum(path.stat().st_size for path in (root / "given").glob("*.safetensors"))
        print(f"{size / MEBIBYTE:.0f} MiB of weights, adapters of {trained / MEBIBYTE:.2f} MiB; {steps} steps")
        print("| strategy | ranks | loss | merged logits | checkpoint | peak of tensors |")
        print("|---|---|---|---|---|---|")
        for name in names:
            row(name, root, losses, logits, steps, length)
            sys.stdout.flush()
    close_pools()


def row(name: str, root: Path, losses: list[float], logits: Tensor, steps: int, length: int) -> None:
    """Print one row, the memory being that of the rank that needs most."""
    from transformers import AutoModelForCausalLM

    ranks, out = ROWS[name], root / name
    out.mkdir()
    found = run_on_ranks(ranks, tuned, name, ranks, root / "given", out, steps, length, timeout=600)
    means = torch.tensor([each.losses for each in found], dtype=torch.float64).mean(0)
    off = ((means - torch.tensor(losses, dtype=torch.float64)) / means).abs().max()
    opener: Any = AutoModelForCausalLM
    model, info = opener.from_pretrained(out / "merged", output_loading_info=True)
    assert not any(info.values()), info
    opened = (logits_of(model, length) - logits).abs().max() / logits.abs().max()
    sizes = [f"{found[0].checkpoint / MEBIBYTE:.2f} MiB", f"{max(each.tensors for each in found) / MEBIBYTE:.0f} MiB"]
    print(f"| {' | '.join([name, str(ranks), f'{off:.1e}', f'{opened:.1e}', *sizes])} |")
    close_pools()
