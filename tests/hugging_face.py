"""Small models of transformers with random weights, and batches for them."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 31
POSITIONS = 20


def causal() -> Any:
    """Return a decoder with learned positions, of which it has 20, and tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": POSITIONS, "n_embd": 16, "n_layer": 2}
    tokens: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return built(GPT2LMHeadModel, GPT2Config(**sizes, **tokens, n_head=2, **_no_dropout("resid", "embd", "attn")))


def llama() -> Any:
    """Return a decoder with rotary positions and two query heads to a key."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24}
    heads: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return built(LlamaForCausalLM, LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=1, pad_token_id=2))


def translator() -> Any:
    """Return an encoder with a decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2}
    tokens: dict[str, Any] = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return built(T5ForConditionalGeneration, T5Config(**sizes, **tokens, num_heads=2, dropout_rate=0.0))


def classifier() -> Any:
    """Return an encoder with a head for three classes."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24}
    heads: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": POSITIONS}
    dropout: dict[str, Any] = {"num_labels": 3} | {
        f"{name}_dropout_prob": 0.0 for name in ("hidden", "attention_probs")
    }
    return built(BertForSequenceClassification, BertConfig(**sizes, **heads, **dropout, pad_token_id=2))


MODELS = {"gpt2": causal, "llama": llama, "t5": translator, "bert": classifier}


def built(kind: Any, config: Any) -> Any:
    """Return a model with fixed weights that are large enough for different prompts to have different answers."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = kind(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.4)
    return model


def _no_dropout(*names: str) -> dict[str, Any]:
    return {f"{name}_pdrop": 0.0 for name in names}


def tokenizer(**options: Any) -> Any:
    """Return a tokenizer whose tokens are the numbers of the vocabulary."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(VOCABULARY)}
    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=Tokenizer(models.WordLevel(words)), pad_token="2", **options)


def collator(kind: str) -> Any:
    """Return the data collator of transformers for a model of ``MODELS``."""
    from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithPadding

    if kind == "bert":
        return DataCollatorWithPadding(tokenizer())
    return DataCollatorForSeq2Seq(tokenizer()) if kind == "t5" else DataCollatorForLanguageModeling(tokenizer(), False)


def samples(kind: str, count: int) -> list[dict[str, Any]]:
    """Return samples of different lengths for ``collator``."""
    generator = torch.Generator().manual_seed(5)

    def tokens(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most, (), generator=generator))
        return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

    found: list[dict[str, Any]] = []
    for number in range(count):
        sample: dict[str, Any] = {"input_ids": tokens(2, 12)}
        if kind in ("bert", "t5"):
            sample["labels"] = number % 3 if kind == "bert" else tokens(1, 9)
        found.append(sample)
    return found
