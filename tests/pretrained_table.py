"""The pretrained table: a model of the size of GPT-2, fine-tuned from a folder of transformers under every strategy.

    python tests/pretrained_table.py                    124 million parameters
    python tests/pretrained_table.py --layers 2 --width 128
    python tests/pretrained_table.py --lora             adapters alone are trained; see adapted_table.py

transformers writes the folder, with random weights. A row loads it, trains some steps, and writes a folder. Its losses
are compared with those of a plain loop that starts with ``from_pretrained``, and the logits of the written folder,
opened by transformers, with those of the loop's model. Memory is that of one rank, from before the model is built until
its weights are read:

    share              its part of the weights
    kept               what the strategy holds beside it from then on: gradient buckets, flat buffers, master weights
    passing            the peak of tensors that are freed again, at most the largest tensor
    peak of tensors    of all of them together
    peak of process    beyond that before the model is built, from the system; memory that was never written is not in
                       it, and some that the C library has not given back is
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from hf_models import tensor_parallel_plan, train_plain
from live_memory import LiveMemory
from models import silent_trainer
from ranks import close_pools, run_on_ranks
from torch import Tensor
from torch.utils.data import DataLoader

from phalanx import TrainModule
from phalanx.framework.pretrained.loading import LoadPlan
from phalanx.framework.state.module_state import model_state
from phalanx.strategies import FSDPStrategy

GLOBAL_BATCH = 4
LEARNING_RATE = 1e-4
MEBIBYTE = 1 << 20
ROWS = {"single": 1, "ddp": 2, "fsdp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "fsdp+tp": 2}
"""How many ranks each strategy trains on."""


@dataclass
class Measured:
    """One rank's losses, and its memory in bytes."""

    losses: list[float]
    share: int
    kept: int
    passing: int
    tensors: int
    process: int


def resident(field: str) -> int:
    """Return a number of bytes from the status of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def forget_peak() -> int:
    """Reset the peak of this process's memory; return the memory that it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


class FineTuned(TrainModule):
    """The model, measured while it is set up."""

    def __init__(self, folder: Path, empty: bool) -> None:
        super().__init__()
        self.folder, self.empty = folder, empty
        self.net: Any = None
        self.losses: list[float] = []
        self.before = self.share = self.process = 0

    def configure_model(self) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.before, builder = forget_peak(), cast(Any, AutoModelForCausalLM)
        with torch.device("meta" if self.empty else "cpu"):
            self.net = builder.from_config(AutoConfig.from_pretrained(self.folder))
        self.load_pretrained(self.folder)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)

    def configure_tensor_parallel(self, mesh: Any) -> dict[str, Any]:
        return tensor_parallel_plan("gpt2")

    def on_fit_start(self) -> None:
        shards = {shard.tensor.data_ptr(): shard.tensor for shard in model_state(self.trainer.strategy, self).values()}
        self.process = resident("VmHWM") - self.before
        self.share = sum(tensor.numel() * tensor.element_size() for tensor in shards.values())


@contextmanager
def counted_until_loaded() -> Iterator[LiveMemory]:
    """Count the memory of tensors until a module's pretrained weights are read."""
    load = LoadPlan.load
    with LiveMemory() as memory:

        def counted(plan: LoadPlan, *arguments: Any) -> None:
            load(plan, *arguments)
            memory.stop()

        LoadPlan.load = counted  # type: ignore[method-assign, assignment]
        try:
            yield memory
        finally:
            LoadPlan.load = load  # type: ignore[method-assign]


def trained(name: str, ranks: int, folder: Path, out: Path, steps: int, length: int, empty: bool) -> Measured:
    """Fine-tune on one rank, and write the folder."""
    # What is imported when a strategy is first used counts as memory too, so a small model precedes.
    for source in (folder.with_name("small"), folder):
        module = FineTuned(source, empty)
        trainer = silent_trainer(strategy=strategy_of(name), devices=ranks, max_steps=steps)
        with counted_until_loaded() as memory:
            trainer.fit(module, loader(trainer.fabric.world.data_size, steps, length))
    trainer.save_pretrained(out)
    kept = memory.kept - module.share
    return Measured(module.losses, module.share, kept, memory.passing, memory.peak, module.process)


def strategy_of(name: str) -> str | FSDPStrategy:
    """Return the strategy of a row."""
    return FSDPStrategy(tensor_parallel=2) if name == "fsdp+tp" else name


def loader(shards: int, steps: int, length: int) -> DataLoader[Any]:
    """Return the samples in order, in batches of one rank."""
    rows = torch.randint(0, 1000, (steps * GLOBAL_BATCH, length), generator=torch.Generator().manual_seed(1))
    return DataLoader(rows, batch_size=GLOBAL_BATCH // shards)  # type: ignore[arg-type]


def by_hand(folder: Path, steps: int, length: int) -> tuple[list[float], Tensor]:
    """Return the losses of a plain loop, and the logits of its model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = train_plain(model, optimizer, loader(1, steps, length))
    return losses, logits_of(model, length)


def logits_of(model: Any, length: int) -> Tensor:
    """Return the logits of one batch."""
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=next(iter(loader(1, 1, length)))).logits
    return logits


def write_folder(folder: Path, layers: int, width: int, **changes: Any) -> int:
    """Let transformers write a model with random weights; return the bytes of its largest tensor."""
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(0)
    changes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    builder: Any = AutoModelForCausalLM
    model = builder.from_config(GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64, **changes))
    model.save_pretrained(folder, max_shard_size="200MB")
    return max(int(parameter.numel() * parameter.element_size()) for parameter in model.parameters())


def table(names: list[str], steps: int, length: int, layers: int, width: int) -> None:
    """Print the rows."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        largest = write_folder(root / "given", layers, width)
        write_folder(root / "small", 1, 64, vocab_size=1000)
        losses, logits = by_hand(root / "given", steps, length)
        size = sum(path.stat().st_size for path in (root / "given").glob("*.safetensors"))
        print(f"{size / MEBIBYTE:.0f} MiB of weights, the largest tensor {largest / MEBIBYTE:.0f} MiB; {steps} steps")
        print(
            "| strategy | ranks | built | loss | logits | share | kept | passing | peak of tensors | peak of process |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        for name in names:
            for empty in (False, True):
                row(name, empty, root, losses, logits, steps, length, AutoModelForCausalLM)
                sys.stdout.flush()
    close_pools()


def row(
    name: str, empty: bool, root: Path, losses: list[float], logits: Tensor, steps: int, length: int, opener: Any
) -> None:
    """Print one row, the memory being that of the rank that needs most."""
    ranks, out = ROWS[name], root / f"{name}-{empty}"
    found = run_on_ranks(ranks, trained, name, ranks, root / "given", out, steps, length, empty, timeout=600)
    means = torch.tensor([each.losses for each in found], dtype=torch.float64).mean(0)
    off = ((means - torch.tensor(losses, dtype=torch.float64)) / means).abs().max()
    model, info = opener.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    opened = (logits_of(model, length) - logits).abs().max() / logits.abs().max()
    measures = ("share", "kept", "passing", "tensors", "process")
    memory = [max(getattr(each, key) for each in found) / MEBIBYTE for key in measures]
    where = "meta" if empty else "deferred"
    cells = [name, ranks, where, f"{off:.1e}", f"{opened:.1e}", *(f"{one:.0f} MiB" for one in memory)]
    print(f"| {' | '.join(map(str, cells))} |")
    close_pools()


def main() -> None:
    import adapted_table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", help=f"some of {','.join(ROWS)}; by default all")
    parser.add_argument("--lora", action="store_true", help="train the adapters of peft")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--length", type=int, default=16, help="tokens of a sample")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    given = parser.parse_args()
    rows, printed = (adapted_table.ROWS, adapted_table.table) if given.lora else (ROWS, table)
    names = given.strategies.split(",") if given.strategies else list(rows)
    printed(names, given.steps, given.length, given.layers, given.width)


if __name__ == "__main__":
    # Ranks find a function by the name of its module, which is not that of a program.
    import pretrained_table

    pretrained_table.main()
