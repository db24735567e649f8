"""Tiny transformers of Hugging Face with the adapters of peft, and what plain torch makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import plain_steps
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import TrainModule
from phalanx.hf import quantize_4bit

VOCABULARY, WIDTH, LENGTH = 37, 16, 6


def gpt2(layers: int = 2) -> Any:
    """Return a GPT-2 with fixed weights, whose layers are of the class Conv1D and whose embeddings are tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=layers,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(3)
    return GPT2LMHeadModel(config)


def llama(layers: int = 2) -> Any:
    """Return a Llama with fixed weights, whose embeddings are not tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
    )
    torch.manual_seed(3)
    return LlamaForCausalLM(config)


def _adapted(base: Any, **settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    defaults: dict[str, Any] = {"r": 3, "lora_alpha": 6, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return get_peft_model(base, LoraConfig(**{**defaults, **settings}))


def _two_adapters(base: Any) -> Any:
    from peft import LoraConfig

    model = _adapted(base, target_modules=["q_proj", "v_proj"])
    model.add_adapter("other", LoraConfig(r=2, init_lora_weights=False, target_modules=["up_proj"]))
    model.set_adapter("other")
    return model


VARIANTS: dict[str, Callable[[], Any]] = {
    "conv1d": lambda: _adapted(gpt2(), target_modules=["c_attn"], fan_in_fan_out=True),
    "linear": lambda: _adapted(llama(), target_modules=["q_proj", "v_proj"]),
    "rslora": lambda: _adapted(llama(), target_modules=["q_proj"], use_rslora=True),
    "dora": lambda: _adapted(llama(), target_modules=["q_proj"], use_dora=True),
    "modules_to_save": lambda: _adapted(llama(), target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "bias": lambda: _adapted(gpt2(), target_modules=["c_attn"], fan_in_fan_out=True, bias="all"),
    "two_adapters": lambda: _two_adapters(llama()),
    "tied_embeddings": lambda: _adapted(gpt2(), target_modules=["wte"]),
    "four_bit": lambda: _adapted(quantize_4bit(llama()), target_modules=["q_proj", "v_proj"]),
    "dropout": lambda: _adapted(llama(), target_modules=["q_proj", "v_proj"], lora_dropout=0.3),
}


class Adapted(TrainModule):
    """Trains a model with adapters, built in ``__init__`` or in ``configure_model``; notes every micro-batch's loss."""

    def __init__(self, variant: str = "conv1d", late: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.variant, self.late = variant, late
        self.losses: list[float] = []
        if not late:
            self.build()

    def build(self) -> None:
        """Build the model, the same on all ranks."""
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.net = VARIANTS[self.variant]()

    def configure_model(self) -> None:
        if self.late:
            self.build()

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean loss over the tokens of rows [batch, length] that have a next one."""
        loss: Tensor = self.net(input_ids=tokens, labels=tokens).loss
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((one for one in self.parameters() if one.requires_grad), lr=5e-2, eps=1e-4)


def rows(count: int) -> Tensor:
    """Return rows of seven of the tokens, [count, LENGTH], which an adapter soon learns to prefer."""
    return torch.randint(7, (count, LENGTH), generator=torch.Generator().manual_seed(0))


def row_loader(count: int, batch_size: int) -> DataLoader[Any]:
    """Return a loader over ``rows``."""
    return DataLoader(TensorDataset(rows(count)), batch_size=batch_size)


def by_hand(module: Adapted, data: Tensor, batch_size: int, steps: int) -> list[float]:
    """Train in one process with plain torch on batches of ``batch_size`` rows; return the loss of each step."""
    module.train()
    return plain_steps(module.configure_optimizers(), module.loss, data.split(batch_size)[:steps])


def frozen_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters that are not trained, by name."""
    return {name: one.detach().clone() for name, one in module.named_parameters() if not one.requires_grad}
