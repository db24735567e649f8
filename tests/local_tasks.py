"""Tasks of lm-evaluation-harness with data on this disk, a tokenizer of single characters, and a model for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from hugging_face import built
from torch import Tensor

from phalanx.framework.system.environment import variables_set

_CHARACTERS = ["<eos>", "<pad>", "<unk>", *"abcdefghijklmnop qrstuvw?.:\n"]
_METRICS: dict[str, Any] = {
    "choice": ("multiple_choice", "{{question}}", "{{gold}}", ["acc", "acc_norm"], {"doc_to_choice": "{{choices}}"}),
    "rolling": ("loglikelihood_rolling", "", "{{text}}", ["word_perplexity", "bits_per_byte"], {}),
    "texts": (
        "generate_until", "{{question}}", "{{answer}}", ["exact_match"],
        {"generation_kwargs": {"until": ["?"], "max_gen_toks": 4}},
    ),
}  # fmt: skip
NAMES = [f"{task}/{metric}" for task, (*_, metrics, _) in _METRICS.items() for metric in metrics]


def tokenizer() -> Any:
    """Return a tokenizer whose tokens are characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {character: number for number, character in enumerate(_CHARACTERS)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    plain.decoder = decoders.Fuse()
    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=plain, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def causal() -> Any:
    """Return a small GPT-2 for the tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none: dict[str, Any] = {f"{name}_pdrop": 0.1 for name in ("resid", "embd", "attn")}
    sizes: dict[str, Any] = {"vocab_size": len(_CHARACTERS), "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return built(GPT2LMHeadModel, GPT2Config(**sizes, **none, bos_token_id=0, eos_token_id=0, pad_token_id=1))


def samples() -> list[dict[str, Tensor]]:
    """Return sequences to train on."""
    ids = torch.randint(3, len(_CHARACTERS), (24, 10), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in ids]


def write_tasks(folder: Path, **options: Any) -> Path:
    """Write three tasks of seven samples, their data and the tokenizer; return the file that names them.

    JSON is YAML, too.
    """
    rows = [
        {
            "question": f"ab{letter}", "choices": [" a", f" b{letter}", " cde"], "gold": number % 3,
            "text": "abc de" * (2 + number) + letter, "answer": letter * 4,
        }
        for number, letter in enumerate("abcdefg")
    ]  # fmt: skip
    data = folder / "data.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer().save_pretrained(folder / "tokens")
    for name, (kind, text, target, metrics, more) in _METRICS.items():
        place = folder / "own" / f"{name}.yaml"
        place.parent.mkdir(exist_ok=True)
        arguments = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
        task = {
            "task": name, "dataset_path": "json", "dataset_kwargs": arguments, "test_split": "test",
            "output_type": kind, "doc_to_text": text, "doc_to_target": target,
            "metric_list": [{"metric": metric} for metric in metrics], **more,
        }  # fmt: skip
        place.write_text(json.dumps(task))
    given = {"tasks": list(_METRICS), "include_path": "own", "batch_size": 2, "tokenizer": "tokens", **options}
    tasks = folder / "tasks.yaml"
    tasks.write_text(json.dumps(given))
    return tasks


def by_the_library(model: Any, folder: Path) -> dict[str, float]:
    """Return the metrics that lm-evaluation-harness computes itself, with its own class for models of transformers."""
    with variables_set({}):
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        # With larger batches it gives the score of a window to another one with the same input, if both are in a batch.
        found = lm_eval.simple_evaluate(
            HFLM(pretrained=model, tokenizer=tokenizer(), batch_size=1, device="cpu"),
            tasks=list(_METRICS),
            task_manager=TaskManager(include_path=str(folder / "own"), include_defaults=False),
            bootstrap_iters=0,
        )
    results: Any = found["results"]
    return {name: float(results[name.split("/")[0]][f"{name.split('/')[1]},none"]) for name in NAMES}
