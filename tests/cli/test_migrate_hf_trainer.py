"""Programs of transformers' Trainer: what ``phalanx migrate`` translates as a whole, and what it leaves."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
import torch
from migrations import rewritten
from ranks import run_script
from torch import nn

import phalanx
from phalanx.cli.main import main
from phalanx.cli.migrate.hf_counterparts import TRANSFORMERS

SCRIPT = '''
"""A regression, written for the Trainer of transformers."""
import json
import sys
from types import SimpleNamespace

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Model(nn.Module):
    """Stands for a model of transformers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))

    def forward(self, inputs, labels):
        loss = nn.functional.mse_loss(self.net(inputs), labels)
        if self.training:
            LOSSES.append(loss.item())
        return SimpleNamespace(loss=loss)


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.inputs = torch.randn(8, 4)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        row = self.inputs[index]
        return {"inputs": row, "labels": row.sum(0, keepdim=True), "text": "a column that forward does not take"}


def collate(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def main(learning_rate=1e-2):
    torch.manual_seed(7)
    rows, model = Rows(), Model()
    args = TrainingArguments(
        output_dir=sys.argv[1],
        num_train_epochs=3,
        per_device_train_batch_size=8,
        learning_rate=learning_rate,
        weight_decay=0.1,
        warmup_steps=1,
        max_grad_norm=0.5,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows, data_collator=collate)
    trainer.train()
    print("losses", json.dumps([*LOSSES, trainer.evaluate()["eval_loss"]]))


LOSSES = []
if __name__ == "__main__":
    main()
'''


def losses_by_hand() -> list[float]:
    torch.manual_seed(7)
    inputs = torch.randn(8, 4)
    targets = inputs.sum(1, keepdim=True)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    decayed = [net[0].weight, net[2].weight]
    others = [net[0].bias, net[1].weight, net[1].bias, net[2].bias]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    found = []
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (0.0, 1.0, 0.5)[step]
        loss = nn.functional.mse_loss(net(inputs), targets)
        found.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [*found, nn.functional.mse_loss(net(inputs), targets).item()]


def test_a_script_trains_to_the_losses_of_a_loop_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    assert main(["migrate", str(file), "--write"]) == 0
    assert "1 file written" in capsys.readouterr().out
    text = file.read_text()
    assert "from transformers" not in text
    done = run_script(text, str(tmp_path))
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("losses ")]
    # The rows of the only batch are in another order, so that sums are rounded differently.
    assert json.loads(line.removeprefix("losses ")) == pytest.approx(losses_by_hand(), rel=1e-5)


METRICS = """
def compute_metrics(evaluation):
    error = abs(evaluation.predictions - evaluation.label_ids).mean()
    return {"error": error, "rows": len(evaluation.predictions)}


LOSSES = []
"""


def test_metrics_of_all_predictions_are_those_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = SCRIPT
    for old, new in (
        ("return SimpleNamespace(loss=loss)", "return ModelOutput(loss=loss, logits=self.net(inputs))"),
        ("from types import SimpleNamespace\n", ""),
        (
            "import Trainer, TrainingArguments\n",
            "import Trainer, TrainingArguments\nfrom transformers.utils import ModelOutput\n",
        ),
        ("use_cpu=True,", "use_cpu=True,\n        per_device_eval_batch_size=3,"),
        ("data_collator=collate)", "data_collator=collate, compute_metrics=compute_metrics)"),
        ("    print(", "    print('metrics', json.dumps({**trainer.evaluate()}))\n    print("),
        ("\nLOSSES = []\n", METRICS),
    ):
        assert program.count(old) == 1
        program = program.replace(old, new)
    found = {}
    for name in ("before", "after"):
        if name == "after":
            (file := tmp_path / "train.py").write_text(program)
            assert main(["migrate", str(file), "--write"]) == 0
            # The remark about weight_decay names a line of the file as it is now.
            (remark,) = [line for line in capsys.readouterr().out.splitlines() if "weight_decay" in line]
            program = file.read_text()
            assert "seed_everything" in program.splitlines()[int(remark.removeprefix(f"{file}:").partition(":")[0]) - 1]
        done = run_script(program, str(tmp_path))
        assert done.returncode == 0, done.stdout
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("metrics ")]
        found[name] = json.loads(line.removeprefix("metrics "))
    assert found["after"]["eval_rows"] == 8
    for key in ("eval_loss", "eval_error", "eval_rows"):
        assert found["after"][key] == pytest.approx(found["before"][key], rel=1e-5)


PROGRAM = """\
from transformers import AutoModel, Trainer, TrainingArguments

args = TrainingArguments({arguments})
trainer = Trainer(model=model, args=args, train_dataset=data{more})
trainer.train()
"""


def test_the_defaults_of_transformers_are_written_into_the_program() -> None:
    text, left = rewritten(PROGRAM.format(arguments='output_dir="out"', more=""))
    assert left == []
    for part in (
        "import phalanx\nimport torch\nimport transformers\nfrom transformers import AutoModel\n",
        "phalanx.seed_everything(42)\n",
        "module = MigratedModule(model, lr=5e-5, weight_decay=0.0)\n",
        "    batch_size=8,\n    shuffle=True,\n",
        "    collate_fn=MigratedCollator(model, transformers.default_data_collator),\n",
        "    max_epochs=3,\n",
        "    gradient_clip_val=1.0,\n",
        "warmup = 0\n",
        "trainer.fit(module, train_loader)\n",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("max_steps=10, num_train_epochs=4", ["max_epochs=-1", "max_steps=10"]),
        ("bf16=True", ['precision="bf16-mixed"']),
        ("fp16=gpu", ['precision="16-mixed" if gpu else "32-true"']),
        ("eval_strategy='steps', eval_steps=5, gradient_accumulation_steps=2", ["val_check_interval=(5) * (2)"]),
        ("evaluation_strategy='epoch'", ["trainer.fit(module, train_loader, eval_loader)"]),
        ("lr_scheduler_type='constant'", ["        return optimizer\n"]),
        (
            "lr_scheduler_type='cosine'",
            ["math.cos(math.pi * (step - warmup) / max(1, steps - warmup))", "import math\n"],
        ),
        ("warmup_ratio=ratio", ["warmup_ratio=ratio", "math.ceil(steps * self.warmup_ratio)", "import math\n"]),
        ("report_to=['wandb']", ['logger="wandb"']),
        ("remove_unused_columns=False", ["collate_fn=transformers.default_data_collator"]),
        ("adam_beta2=0.95, seed=3", ["betas=(0.9, 0.95)", "phalanx.seed_everything(3)"]),
    ],
)
def test_arguments_are_translated(arguments: str, parts: list[str]) -> None:
    text = rewritten(PROGRAM.format(arguments=arguments, more=", eval_dataset=data")).text
    for part in parts:
        assert part in text


def test_imports_of_a_function_are_those_of_the_module_that_uses_them() -> None:
    program = "import math\n\n\ndef main():\n    import torch\n" + "".join(
        f"    {line}\n" for line in PROGRAM.format(arguments="output_dir='out'", more="").splitlines()
    )
    text = rewritten(program).text
    head, _, body = text.partition("def main():\n")
    assert head.startswith(
        "import math\n\n\nimport inspect\nimport phalanx\nimport torch\nimport transformers\n\n\nclass "
    )
    assert body.startswith("    import torch\n    from transformers import AutoModel\n")


def test_methods_are_translated() -> None:
    program = PROGRAM.format(arguments="output_dir=out", more=", tokenizer=tokenizer").replace(
        "trainer.train()\n", "trainer.train(resume_from_checkpoint=True)\nif save:\n    trainer.save_model()\n"
    )
    text = rewritten(program).text
    assert 'trainer.fit(module, train_loader, ckpt_path="auto")\n' in text
    assert "MigratedCollator(model, transformers.DataCollatorWithPadding(tokenizer))" in text
    assert text.endswith(
        "if save:\n"
        "    if trainer.is_global_zero:\n"
        "        module.model.save_pretrained(out)\n"
        "        tokenizer.save_pretrained(out)\n"
    )


def test_a_program_that_is_not_certain_stays_and_all_its_parts_are_listed() -> None:
    program = """
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

    class Mine(Trainer):
        def compute_loss(self, model, inputs): ...

    args = TrainingArguments(
        output_dir="out",
        optim="adafactor",
        neftune_noise_alpha=5,
    )
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[EarlyStoppingCallback(3)])
    result = trainer.train()
    """
    found = rewritten(program)
    assert found.text == textwrap.dedent(program)
    lines = [line for line, _ in found.left]
    assert lines == [4, 4, 5, 7, 12, 12]
    assert any("Mine overrides methods" in reason for _, reason in found.left)
    assert (5, "Mine.compute_loss: write training_step of the TrainModule.") in found.left
    found = rewritten(program.replace("class Mine(Trainer)", "class Mine"))
    reasons = {line: reason for line, reason in found.left if "not translated" in reason}
    assert sorted(reasons) == [9, 10, 12]
    assert "optim=" in reasons[9]
    assert "neftune_noise_alpha=5" in reasons[10]
    assert "metric_for_best_model" in reasons[12]


def test_early_stopping_is_translated_if_it_counts_the_same() -> None:
    stopping = "EarlyStoppingCallback(early_stopping_patience=patience)"
    more = f", eval_dataset=data, callbacks=[{stopping}]"
    program = PROGRAM.format(arguments="metric_for_best_model='accuracy', eval_strategy='epoch'", more=more)
    program = program.replace("import AutoModel,", "import AutoModel, EarlyStoppingCallback,")
    found = rewritten(program)
    assert found.left == []
    assert 'callbacks=[phalanx.callbacks.EarlyStopping("eval_accuracy", mode="max", patience=patience)]' in found.text
    assert "from transformers import AutoModel\n" in found.text
    assert 'EarlyStopping("eval_loss", mode="min"' in rewritten(program.replace("'accuracy'", "'eval_loss'")).text
    for change in (("=patience", "=2, early_stopping_threshold=0.1"), ("'accuracy'", "name"), (stopping, "Mine()")):
        changed = program.replace(*change)
        assert rewritten(changed).text == changed


@pytest.mark.parametrize(
    "change",
    [
        ("trainer.train()", "result = trainer.train()"),
        ("trainer.train()", "trainer.predict(data)"),
        ("trainer.train()", "def f(): trainer.train()"),
        ("trainer.train()", "print(args.output_dir); trainer.train()"),
        ("trainer = Trainer", "trainer = other = Trainer"),
        ("output_dir=", ""),
    ],
)
def test_a_use_that_is_not_understood_leaves_the_program_as_it_is(change: tuple[str, str]) -> None:
    program = PROGRAM.format(arguments="output_dir='out'", more="").replace(*change)
    found = rewritten(program)
    assert found.text == program
    assert found.left


def test_the_hooks_that_are_recommended_exist() -> None:
    owners = {"TrainModule": phalanx.TrainModule, "Callback": phalanx.Callback, "DataModule": phalanx.DataModule}
    for methods in TRANSFORMERS.methods.values():
        for advice in methods.values():
            words = advice.replace(",", "").replace(";", "").split()
            if words[0] == "write" and words[1] != "a":
                owner = next(owner for name, owner in owners.items() if name in words)
                assert hasattr(owner, words[1]), advice
