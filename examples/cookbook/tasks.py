"""The shared tasks: the small models, the data and the options that the recipes use.

Digits are scikit-learn's 1,797 images of 8 x 8 pixels, and text is the source of Python's standard library, so no
recipe downloads anything. Run a recipe from any folder: ``python examples/cookbook/early_stopping.py``. Each takes
``--out``, the directory for its files, and ``--short``, which trains for a moment only.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import TrainModule

# For fits whose result is in memory: no logs, no checkpoints, no output.
NO_FILES: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "verbose": False}
# The characters of a prompt in a pair of texts.
PROMPT = 12


class DigitClassifier(TrainModule):
    """A network of two linear layers. Inputs are ``[batch, 64]``, labels ``[batch]``."""

    def __init__(self, width: int = 64, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(nn.Linear(64, width), nn.ReLU())
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(images))
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels))
        self.log("val_accuracy", (logits.argmax(dim=1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.hparams.learning_rate)


def digits() -> TensorDataset:
    """Return all images ``[1797, 64]``, with values from 0 to 1, and their labels."""
    # Text recipes do without scikit-learn.
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels))


def digit_loaders(batch_size: int = 64) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders of 1,500 images for training and of the others for validation."""
    images, labels = digits().tensors
    training, validation = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])
    return DataLoader(training, batch_size, shuffle=True), DataLoader(validation, 256)


def standard_library(num_files: int) -> list[str]:
    """Return the paragraphs of modules of Python's standard library, in alphabetical order of the files."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:num_files]
    text = "\n\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    return [paragraph for paragraph in text.split("\n\n") if paragraph.isascii() and len(paragraph) > 20]


def preference_pairs(count: int) -> list[dict[str, Tensor]]:
    """Return pairs of ``chosen`` and ``rejected`` ``[48]``: two ends of a line of source code, as padded bytes.

    The first ``PROMPT`` bytes are the same. The rejected end has the words of the chosen one in the reverse order.
    """
    lines = {line.strip() for text in standard_library(num_files=40) for line in text.splitlines()}
    wanted = sorted(line for line in lines if 36 <= len(line) <= 48 and line[PROMPT:].count(" ") >= 3)
    found = []
    for line in wanted[:: len(wanted) // count][:count]:
        texts = line, line[:PROMPT] + " ".join(reversed(line[PROMPT:].split(" ")))
        chosen, rejected = (torch.tensor([*text.encode().ljust(48, b"\0")]) for text in texts)
        found.append({"chosen": chosen, "rejected": rejected})
    return found


def tiny_llama(vocabulary: int) -> Any:
    """Return a Llama of transformers with two small layers, and no token that ends a text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    tokens: dict[str, Any] = {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes, **tokens))


def log_probabilities(model: nn.Module, tokens: Tensor, start: int) -> Tensor:
    """Return those of the tokens from position ``start`` on, given the ones before: ``[rows, length - start]``."""
    logits = model(input_ids=tokens).logits[:, start - 1 : -1].float()
    found: Tensor = logits.log_softmax(-1).gather(-1, tokens[:, start:, None]).squeeze(-1)
    return found


def recipe_options(description: str | None, ranks: bool = False, **flags: str) -> argparse.Namespace:
    """Parse the command line of a recipe. ``ranks``: with a strategy and a number of ranks; ``flags``: by name."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    if ranks:
        parser.add_argument("--strategy", default="auto", help="how to distribute work over ranks, such as ddp or fsdp")
        parser.add_argument("--devices", type=int, default=1, help="number of ranks on this machine")
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument("--out", default="runs", help="directory for logs and checkpoints")
    parser.add_argument("--short", action="store_true", help="train for a moment only, as a quick check")
    return parser.parse_args()


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    """Return whether two modules have the same weights, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
