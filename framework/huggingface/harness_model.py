"""A causal language model as lm-evaluation-harness sees it, also while its weights are sharded.

Every rank asks the same requests. They are divided over the ranks that read different data, and each rank makes the
same number of forward passes: one that has fewer requests runs fillers if passes contain collectives. The answers are
gathered, so that every rank computes the same results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..core.errors import ConfigurationError
from ..distributed.world import World
from ..parallel.generation import generates

T = TypeVar("T")
R = TypeVar("R")
_DEFAULT_LENGTH = 2048
_MOST_NEW_TOKENS = 256
Scored = tuple[float, bool]
"""The log-likelihood of a continuation, and whether greedy search gives it."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that answer requests together.

    Args:
        world: the ranks.
        fills: whether all ranks must run the same number of forward passes.
        tick: called after each batch.
    """

    world: World
    fills: bool
    tick: Callable[[], None]

    def share(self, items: Sequence[T], batch_size: int, run: Callable[[Sequence[T]], Sequence[R]]) -> list[R]:
        """Return the results of all items, in their order; ``run`` gets batches of this rank's. Collective.

        A filler is a batch of the first item, whose result is dropped.
        """
        if not items:
            return []
        rank, size = self.world.data_rank, self.world.data_size
        own = range(rank, len(items), size)
        most = -(-len(items) // size)
        found: list[R] = []
        for start in range(0, most if self.fills else len(own), batch_size):
            batch = [items[index] for index in own[start : start + batch_size]]
            if batch:
                found += run(batch)
            else:
                run(items[:1])
            self.tick()
        results: dict[int, R] = {}
        for counts, first, part in self.world.all_gather_object((self.world.counts_data, rank, found)):
            if counts:
                results.update(zip(range(first, len(items), size), part, strict=True))
        return [results[index] for index in range(len(items))]

    def any(self, condition: bool) -> bool:
        """Whether a condition holds on any rank that must run the same passes. Collective then."""
        return self.world.control_reduce([float(condition)]).wait()[0] > 0 if self.fills else condition


class CausalModel:
    """The log-likelihoods and the texts of a module that predicts the next token.

    The outermost model of transformers in the module is called, or else the module itself with tokens
    ``[batch, sequence]``, which returns logits ``[batch, sequence, vocabulary]``, an object with ``logits``, or a dict.

    Args:
        module: the module, in evaluation mode.
        tokenizer: its tokenizer, as in transformers.
        ranks: the ranks.
        batch_size: the number of sequences of a forward pass of one rank.
        max_length: the longest sequence in tokens; None for that of the model's configuration or the tokenizer.

    Raises:
        ConfigurationError: the module has neither a model of transformers nor a ``forward``.
    """

    def __init__(
        self, module: nn.Module, tokenizer: Any, ranks: Ranks, batch_size: int = 1, max_length: int | None = None
    ) -> None:
        self.generator = next((part for part in module.modules() if generates(part)), None)
        if self.generator is None and type(module).forward is nn.Module.forward:
            raise ConfigurationError(
                f"{type(module).__name__} has no forward() and no causal model of transformers, so it cannot answer "
                "tasks of lm-evaluation-harness: define forward(tokens) that returns logits."
            )
        self.model: nn.Module = module if self.generator is None else self.generator
        self.tokenizer, self.ranks, self.batch_size = tokenizer, ranks, batch_size
        self.max_length = max_length or _longest(self.model, tokenizer)

    # ---- log-likelihoods --------------------------------------------------------------------------------------------

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Scored]:
        """Return the log-likelihood of each continuation after its context, both as tokens. Collective.

        Pairs with the same input, as answers of one token to one question, take one row of a pass.
        """
        asked: dict[tuple[int, ...], list[int]] = {}
        for number, (context, continuation) in enumerate(pairs):
            tokens = [*context, *continuation][-(self.max_length + 1) :]
            asked.setdefault(tuple(tokens[:-1]), []).append(number)
        # Long inputs come first, so that those of a batch have about the same length.
        rows = sorted(asked, key=lambda row: (-len(row), row))

        def run(batch: Sequence[tuple[int, ...]]) -> list[list[Scored]]:
            logits = self._logits([*batch])
            return [
                [_scored(one[: len(row)], pairs[number][1]) for number in asked[row]]
                for row, one in zip(batch, logits, strict=True)
            ]

        found = self.ranks.share(rows, self.batch_size, run)
        scores = {
            number: score
            for row, answers in zip(rows, found, strict=True)
            for number, score in zip(asked[row], answers, strict=True)
        }
        return [scores[number] for number in range(len(pairs))]

    def _logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        # Padding at the end has no effect on the tokens before it, so that it needs no mask.
        longest = max(map(len, rows))
        padded = [[*row, *[0] * (longest - len(row))] for row in rows]
        tokens = torch.tensor(padded, device=self.ranks.world.device)
        return _logits_of(self.model(tokens), self.model)

    # ---- generation -------------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Return the text that follows each prompt, up to the first of its stop sequences. Collective.

        Args:
            prompts: each text with the generation arguments of its task.
        """
        groups: dict[str, list[int]] = {}
        for number, (_, arguments) in enumerate(prompts):
            groups.setdefault(json.dumps(arguments, sort_keys=True, default=str), []).append(number)
        texts: dict[int, str] = {}
        for numbers in groups.values():
            contexts = {number: self.encode(prompts[number][0]) for number in numbers}
            ordered = sorted(numbers, key=lambda number: (-len(contexts[number]), prompts[number][0]))
            found = self._generate([contexts[number] for number in ordered], prompts[numbers[0]][1])
            texts.update(zip(ordered, found, strict=True))
        return [texts[number] for number in range(len(prompts))]

    def _generate(self, contexts: Sequence[Sequence[int]], arguments: Mapping[str, Any]) -> list[str]:
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

        options: dict[str, Any] = {**normalize_gen_kwargs(dict(arguments), _MOST_NEW_TOKENS)}
        eos = None if self.end is None else self.tokenizer.decode([self.end], skip_special_tokens=False)
        stops: list[str] = handle_stop_sequences(options.pop("until", None), eos=eos)
        count = int(options.pop("max_gen_toks"))
        if count >= self.max_length:
            raise ConfigurationError(
                f"a task generates up to {count} tokens, and the model takes {self.max_length}: give max_gen_toks in "
                "the generation_kwargs of the task."
            )
        kept = [[*context][-(self.max_length - count) :] for context in contexts]
        search = self._greedy if self.generator is None else self._search

        def run(batch: Sequence[Sequence[int]]) -> list[str]:
            texts = [
                self.tokenizer.decode(row, skip_special_tokens=True) for row in search(batch, count, stops, options)
            ]
            return [postprocess_generated_text(text, stops, None) for text in texts]

        return self.ranks.share(kept, self.batch_size, run)

    def _search(
        self, contexts: Sequence[Sequence[int]], count: int, stops: Sequence[str], options: Mapping[str, Any]
    ) -> list[list[int]]:
        """Generate with ``generate`` of the model."""
        from lm_eval.models.utils_hf import stop_sequences_criteria

        options = {**options}
        if not options.get("do_sample"):
            options.pop("temperature", None)
        longest = max(map(len, contexts))
        device, padding = self.ranks.world.device, self.padding
        rows = torch.tensor([[*[padding] * (longest - len(row)), *row] for row in contexts], device=device)
        mask = torch.tensor([[*[0] * (longest - len(row)), *[1] * len(row)] for row in contexts], device=device)
        options.setdefault("max_length", longest + count)
        criteria = stop_sequences_criteria(self.tokenizer, [*stops], longest, len(rows))
        generate: Callable[..., Tensor] = self.model.generate  # type: ignore[assignment]
        found = generate(
            input_ids=rows, attention_mask=mask, stopping_criteria=criteria, pad_token_id=padding, **options
        )
        return found[:, longest:].tolist()

    def _greedy(
        self, contexts: Sequence[Sequence[int]], count: int, stops: Sequence[str], options: Mapping[str, Any]
    ) -> list[list[int]]:
        """Generate by greedy search, with a pass over the whole sequences for each token."""
        if options.get("do_sample"):
            raise ConfigurationError(
                f"a task samples (do_sample), and {type(self.model).__name__} has no generate() as models of "
                "transformers do: give do_sample: false in the generation_kwargs of the task."
            )
        rows, goes_on = [[*row] for row in contexts], [True] * len(contexts)
        for _ in range(count):
            if not self.ranks.any(any(goes_on)):
                break
            logits = self._logits(rows)
            for index, row in enumerate(rows):
                if not goes_on[index]:
                    continue
                row.append(int(logits[index, len(row) - 1].argmax()))
                text = self.tokenizer.decode(row[len(contexts[index]) :])
                goes_on[index] = row[-1] != self.end and not any(stop and stop in text for stop in stops)
        return [row[len(context) :] for row, context in zip(rows, contexts, strict=True)]

    # ---- tokens -----------------------------------------------------------------------------------------------------

    @property
    def end(self) -> int | None:
        """The token that ends a text."""
        found: int | None = self.tokenizer.eos_token_id
        return found

    @property
    def prefix(self) -> int:
        """The token before a text without a context.

        Raises:
            ConfigurationError: the tokenizer has no such token.
        """
        first: int | None = self.tokenizer.bos_token_id
        found = self.end if first is None else first
        if found is None:
            raise ConfigurationError(
                "the tokenizer has neither a bos_token nor an eos_token, one of which stands before a text without a "
                "context: set one."
            )
        return found

    @property
    def padding(self) -> int:
        """The token of padding, which attention masks leave out."""
        given: int | None = self.tokenizer.pad_token_id
        return next((token for token in (given, self.end) if token is not None), 0)

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the tokens of a text; special tokens are not added to one that begins with them."""
        start = getattr(self.tokenizer, "bos_token", None)
        if add_special_tokens is None and start and text.startswith(start):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        found: list[int] = self.tokenizer.encode(text, **options)
        return found


def as_harness_model(model: CausalModel) -> Any:
    """Return an ``LM`` of lm-evaluation-harness that asks a model."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class HarnessModel(TemplateLM):  # type: ignore[misc,unused-ignore]
        """Every rank asks all requests: for the harness there is one process."""

        tokenizer = model.tokenizer
        max_length = model.max_length
        tokenizer_name = str(getattr(model.tokenizer, "name_or_path", ""))

        @property
        def eot_token_id(self) -> int | None:
            return model.end

        @property
        def prefix_token_id(self) -> int:
            return model.prefix

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return model.encode(string, add_special_tokens)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[Scored]:
            return model.score([(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            windows = [
                [
                    make_disjoint_window(window)
                    for window in get_rolling_token_windows(
                        token_list=model.encode(request.args[0]),
                        prefix_token=model.prefix,
                        max_seq_len=model.max_length,
                        context_len=1,
                    )
                ]
                for request in requests
            ]
            scores = iter(model.score([window for each in windows for window in each]))
            return [sum(next(scores)[0] for _ in each) for each in windows]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return model.generate([request.args for request in requests])

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            text: str = model.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
            return text

    return HarnessModel()


def _scored(logits: Tensor, continuation: Sequence[int]) -> Scored:
    """Return the score of the last tokens of an input, given its logits ``[sequence, vocabulary]``."""
    expected = torch.tensor(continuation, device=logits.device)[-len(logits) :]
    chances = logits[-len(expected) :].float().log_softmax(-1)
    is_greedy = bool((chances.argmax(-1) == expected).all())
    return float(chances.gather(-1, expected[:, None]).sum()), is_greedy


def _logits_of(output: Any, model: nn.Module) -> Tensor:
    """Return the logits in the output of a model."""
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(found, Tensor) or found.dim() != 3:
        shape = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else type(output).__name__
        raise ConfigurationError(
            f"forward() of {type(model).__name__} returned {shape} for tokens [batch, sequence]: tasks of "
            "lm-evaluation-harness need logits [batch, sequence, vocabulary]."
        )
    return found


def _longest(model: nn.Module, tokenizer: Any) -> int:
    """Return the longest sequence in tokens that a model or its tokenizer names."""
    config = getattr(model, "config", None)
    for holder in (getattr(config, "text_config", None), config):
        for name in ("n_positions", "max_position_embeddings", "n_ctx"):
            if isinstance(found := getattr(holder, name, None), int):
                return found
    # Tokenizers without a limit name a very large number.
    limit = getattr(tokenizer, "model_max_length", None)
    return limit if isinstance(limit, int) and limit < 1e9 else _DEFAULT_LENGTH
