"""Tiny models of transformers, the folders that it writes of them, and a module that is fine-tuned from one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from models import plain_steps
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.utils.data import DataLoader

from phalanx import TrainModule

VOCABULARY = 61
GLOBAL_BATCH = 6
LENGTH = 8


def tiny_config(kind: str, **changes: Any) -> Any:
    """Return the config of a tiny model: ``"gpt2"``, ``"llama"`` or ``"bert"``."""
    from transformers import BertConfig, GPT2Config, LlamaConfig
    from transformers.utils.logging import disable_progress_bar

    # A bar starts a thread, which the tests would find left behind.
    disable_progress_bar()
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if kind == "gpt2":
        none: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=LENGTH, **common, **none, **changes)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    if kind == "llama":
        return LlamaConfig(num_key_value_heads=1, max_position_embeddings=LENGTH, **sizes, **common, **changes)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(max_position_embeddings=LENGTH, **sizes, **common, **none, **changes)


def model_class(kind: str) -> Any:
    """Return the class of the model of a kind: two language models with and without tied weights, and a masked one."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM


def written(kind: str, folder: Path, max_shard_size: str = "5GB", **changes: Any) -> Path:
    """Let transformers write a model with random weights; return the folder."""
    torch.manual_seed(5)
    model = model_class(kind).from_config(tiny_config(kind, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norms differ from their initial values too.
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def tokens() -> Tensor:
    """Return the samples of four steps."""
    return torch.randint(0, VOCABULARY, (4 * GLOBAL_BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def loader(ranks: int = 1) -> DataLoader[Any]:
    """Return the samples in order, in batches of one rank."""
    return DataLoader(tokens(), batch_size=GLOBAL_BATCH // ranks)  # type: ignore[arg-type]


class FineTuned(TrainModule):
    """A model of transformers that is built in ``configure_model`` and starts from the weights in a folder."""

    def __init__(self, kind: str, folder: Path | None, empty: bool = False, **options: Any) -> None:
        super().__init__()
        self.kind, self.folder, self.empty, self.options = kind, folder, empty, options
        self.net: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta" if self.empty else "cpu"):
                self.net = model_class(self.kind).from_config(tiny_config(self.kind))
            if self.folder is not None:
                self.load_pretrained(self.folder, **self.options)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_tensor_parallel(self, mesh: DeviceMesh) -> dict[str, Any]:
        return tensor_parallel_plan(self.kind)


def by_hand(kind: str, folder: Path, steps: int) -> tuple[list[float], nn.Module]:
    """Return the losses and the model of a plain loop that starts with ``from_pretrained``."""
    model: nn.Module = model_class(kind).from_pretrained(folder)
    model.train()
    return train_plain(model, torch.optim.SGD(model.parameters(), lr=0.1), list(loader())[:steps]), model


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Tensor]) -> list[float]:
    """Train a language model by a plain loop; return the loss of each step."""
    return plain_steps(optimizer, lambda batch: model(input_ids=batch, labels=batch).loss, batches)


class SplitConv1D(ParallelStyle):
    """Splits a ``Conv1D`` of transformers, a linear layer whose weight is stored transposed.

    Args:
        dim: 1 to split the outputs over the ranks, 0 to split the inputs and to add the results.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
            whole: Any = {"weight": Shard(self.dim), "bias": Shard(0) if self.dim == 1 else Replicate()}
            for key, placement in whole.items():
                value = distribute_tensor(part.get_parameter(key), mesh, [placement])
                part.register_parameter(key, nn.Parameter(value))

        def inputs(part: nn.Module, given: Any, mesh: DeviceMesh) -> Any:
            return DTensor.from_local(given[0], mesh, [Replicate() if self.dim == 1 else Shard(-1)], run_check=False)

        def outputs(part: nn.Module, made: Any, mesh: DeviceMesh) -> Any:
            return made.redistribute(placements=[Shard(-1) if self.dim == 1 else Replicate()]).to_local()

        return distribute_module(module, device_mesh, split, inputs, outputs)


def tensor_parallel_plan(kind: str) -> dict[str, Any]:
    """Return the plan that splits the feed-forward layers of a kind of model, and Llama's attention."""
    if kind == "gpt2":
        return {"net.transformer.h.*.mlp.c_fc": SplitConv1D(1), "net.transformer.h.*.mlp.c_proj": SplitConv1D(0)}
    layers = "net.model.layers.*."
    columns, rows = ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)
    return {
        **{layers + name: ColwiseParallel() for name in columns},
        **{layers + name: RowwiseParallel() for name in rows},
    }
