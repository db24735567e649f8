"""The fine-tuning example reaches what a loop in plain torch reaches, in full and by adapters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import silent_trainer
from test_examples import number_after, run_example
from torch import nn
from torch.utils.data import DataLoader

import phalanx

EXAMPLES = Path(phalanx.__file__).parent / "examples"


@pytest.fixture
def finetune(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import finetune

    yield finetune
    del sys.modules["finetune"]


def without_dropout(net: nn.Module) -> nn.Module:
    for part in net.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return net


def plain_model(folder: str, classes: int, lora: bool) -> nn.Module:
    """Return the model as transformers and peft load it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    net: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=classes)
    if lora:
        modules = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
        net = get_peft_model(net, LoraConfig(r=8, lora_alpha=16, **modules))
    return without_dropout(net).train()


def train_plain(net: nn.Module, batches: list[Any], learning_rate: float) -> list[float]:
    """Train as the example does, and return the loss of each step."""
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(batches))
    losses = []
    for batch in batches:
        loss = net(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("lora", [False, True])
def test_it_trains_as_plain_torch_does(finetune: Any, lora: bool) -> None:
    from transformers import AutoTokenizer

    folder = str(finetune.package_folder(finetune.MODEL) / "model")
    training, validation = finetune.load_data(AutoTokenizer.from_pretrained(folder), 10, 8)
    batches = list(DataLoader(training.dataset, 8, collate_fn=training.collate_fn))
    torch.manual_seed(7)
    plain = plain_model(folder, 4, lora)
    start = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    learning_rate = 5e-3 if lora else 2e-4
    expected = train_plain(plain, batches, learning_rate)
    plain.eval()
    with torch.no_grad():
        right = [(plain(**batch).logits.argmax(-1) == batch["labels"]).float() for batch in validation]

    losses: list[float] = []

    class Classifier(finetune.TextClassifier):  # type: ignore[misc]
        def on_fit_start(self) -> None:
            without_dropout(self.net)
            # The new head and the adapters of both have the same values.
            new = {name: start[name] for name, one in self.net.named_parameters() if one.requires_grad}
            self.net.load_state_dict(new, strict=False)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(float(outputs["loss"]))

    module = Classifier(folder, 4, lora, learning_rate)
    trainer = silent_trainer(max_epochs=1)
    trainer.fit(module, DataLoader(training.dataset, 8, collate_fn=training.collate_fn), validation)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]
    assert trainer.callback_metrics["val_accuracy"].item() == pytest.approx(torch.cat(right).mean().item())
    if lora:
        frozen = [one for one in module.parameters() if not one.requires_grad]
        assert all(one.grad is None for one in frozen)
        assert len(frozen) > 100


def accuracy_of(finetune: Any, folder: Path) -> float:
    """Return the accuracy in percent of a written folder, as transformers opens it, on the texts of a short run."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    net: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    _, validation = finetune.load_data(AutoTokenizer.from_pretrained(folder), 40, 8)
    with torch.no_grad():
        right = [(net(**batch).logits.argmax(-1) == batch["labels"]).float() for batch in validation]
    return 100 * torch.cat(right).mean().item()


def test_merged_adapters_are_as_accurate_in_transformers(finetune: Any, tmp_path: Path) -> None:
    output = run_example("finetune.py", tmp_path, "--lora", strategy="fsdp", devices=2)
    assert "75.3 K trainable, 22.7 M frozen" in output
    assert output.count("accuracy:") == 1
    accuracy = number_after("accuracy:", output)
    assert accuracy > 40
    assert accuracy_of(finetune, tmp_path / "finetune" / "version_0" / "model") == pytest.approx(accuracy, abs=0.05)
