"""The search of the site: the index that a page loads, ranked as the script of the page ranks it."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

from lunr import get_default_builder
from lunr.stemmer import stemmer
from lunr.trimmer import trimmer

# What people type, and the pages of which one is an answer.
QUERIES: dict[str, tuple[str, ...]] = {
    "multi gpu": ("several-gpus",),
    "train on several gpus": ("several-gpus",),
    "ddp": ("several-gpus", "choosing-a-strategy", "distributed"),
    "resume training": ("resume",),
    "continue after crash": ("resume", "failures", "debugging"),
    "save best model": ("best-model",),
    "early stopping": ("best-model", "examples/cookbook/early_stopping"),
    "gradient accumulation": ("accumulation",),
    "effective batch size": ("accumulation",),
    "learning rate warmup": ("learning-rate-schedules",),
    "cosine scheduler": ("learning-rate-schedules",),
    "find learning rate": ("learning-rate-schedules", "examples/cookbook/learning_rate_finder"),
    "mixed precision": ("mixed-precision",),
    "bf16": ("mixed-precision",),
    "fp16": ("mixed-precision", "precision"),
    "load checkpoint for inference": ("inference",),
    "predict": ("inference",),
    "lora": ("fine-tune-lora",),
    "fine-tune llm": ("fine-tune-lora",),
    "gan": ("gans",),
    "multiple optimizers": ("gans", "optimizers"),
    "custom training loop": ("custom-loop",),
    "wandb": ("weights-and-biases",),
    "weights and biases": ("weights-and-biases",),
    "slurm": ("slurm",),
    "sbatch": ("slurm",),
    "hang": ("debugging",),
    "nan loss": ("numbers", "faq", "debugging"),
    "out of memory": ("activations", "faq", "debugging", "choosing-a-strategy"),
    "s3": ("object-storage",),
    "tensorboard": ("loggers",),
    "model too big for one gpu": ("choosing-a-strategy", "several-gpus", "faq"),
    "migrate from lightning": ("migrating-from-lightning",),
    "accelerate": ("migrating-from-accelerate",),
    "torch.compile": ("compile",),
    "dataloader": ("data",),
    "install": ("installation",),
    "jupyter": ("notebooks",),
    "tensor parallelism": ("parallelism",),
    "ema": ("averages",),
    "preemption": ("failures", "resume", "slurm", "examples/cookbook/preemption"),
    "Trainer arguments": ("trainer", "api/phalanx.Trainer"),
}


_TAG = re.compile(r"<[^>]*>")


class SiteSearch:
    """Finds pages as the search of mkdocs-material 9 does, which ranks with lunr without the lengths of fields.

    Args:
        index: ``search/search_index.json`` of a site.
    """

    def __init__(self, index: Path) -> None:
        given = json.loads(index.read_text(encoding="utf-8"))
        self._separator = re.compile(given["config"]["separator"])
        builder = get_default_builder()
        builder.b(0)
        for each in (trimmer, stemmer):
            if each.label not in given["config"]["pipeline"]:
                builder.pipeline.remove(each)
                builder.search_pipeline.remove(each)
        builder.ref("location")
        builder.field("title", boost=1_000)
        builder.field("text", boost=1)
        for each in given["docs"]:
            words = {name: self._words(each[name]) for name in ("title", "text")}
            builder.add({"location": each["location"], **words}, {"boost": each.get("boost", 1)})
        self._index = builder.build()

    def pages(self, query: str, count: int = 3) -> list[str]:
        """Return the first pages that the search shows, without their suffix."""
        terms = self._words(query).lower().split()
        scores = []
        for found in self._index.search(" ".join(f"{term}*" for term in terms)):
            words = found["match_data"].metadata
            matched = sum(any(word.startswith(term) for word in words) for term in terms) / len(terms)
            is_page = "#" not in found["ref"]
            scores.append((found["score"] * (1 + (is_page + matched) ** 2), found["ref"]))
        shown: dict[str, None] = {}
        for _, place in sorted(scores, reverse=True):
            shown[place.partition("#")[0].removesuffix(".html")] = None
        return list(shown)[:count]

    def _words(self, text: str) -> str:
        return " ".join(self._separator.split(html.unescape(_TAG.sub(" ", text))))


def missed(site: Path) -> dict[str, list[str]]:
    """Return the queries for which no right page is among the first three of a site, with the pages that are."""
    search = SiteSearch(site / "search" / "search_index.json")
    found = {query: search.pages(query) for query in QUERIES}
    return {query: pages for query, pages in found.items() if not set(pages) & set(QUERIES[query])}
