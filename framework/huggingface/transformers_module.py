"""``TransformersModule``: a ``TrainModule`` around any model of transformers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..api.train_module import TrainModule
from ..core.arguments import names_arguments
from ..core.errors import ConfigurationError, DataError, LoopError
from ..parallel.sequence_part import SequencePart
from .model_config import (
    build_model,
    config_of,
    config_values,
    generation_of,
    model_class,
    predicts_next_token,
    predicts_tokens,
    refuse_adapters,
)

IGNORED = -100
"""The label of tokens that a loss does not count, in transformers and its data collators."""
_CUT = ("input_ids", "labels", "attention_mask")


class TransformersModule(TrainModule):
    """Trains a model of transformers on batches of its data collators, as they are.

    The loss is the mean over all labels that count, of the batches of all ranks and of an accumulation window. A folder
    or a configuration is built in ``configure_model``, under the strategy, so that it need not fit into the memory of
    one rank.

    Args:
        model: a folder with weights as ``save_pretrained`` writes it, a configuration (an object of transformers or a
            dict) to start from new weights, or a model.
        task: what the model is for: the name of a task such as ``"causal-lm"``, or a class of transformers. Not needed
            for a model.
        learning_rate: the learning rate.
        weight_decay: the weight decay of matrices and tensors with more dims. Biases and norms have none.
        optimizer: a class or function called with parameter groups and ``lr``.
        lr_scheduler: a schedule by name: ``"linear"``, ``"cosine"``, ``"constant"``, ``"inverse_sqrt"`` or ``"wsd"``.
        warmup: the optimizer steps of its warm-up; below 1, their share of all steps.

    Raises:
        ConfigurationError: there is no such folder or task, or transformers is not installed.
    """

    @names_arguments
    def __init__(
        self,
        model: Any,
        task: str | type = "causal-lm",
        *,
        learning_rate: float = 5e-5,
        weight_decay: float = 0.01,
        optimizer: Callable[..., Optimizer] = torch.optim.AdamW,
        lr_scheduler: str | None = None,
        warmup: float = 0.0,
    ) -> None:
        super().__init__()
        built = isinstance(model, nn.Module) and hasattr(model, "config")
        task = type(model) if built else task
        self._class = model_class(task)
        if not built:
            refuse_adapters(self._class)
        self.config: Any = model.config if built else config_of(model)
        self._generation: Any = generation_of(model, self.config)
        self._folder = os.fspath(model) if isinstance(model, str | os.PathLike) else None
        self.learning_rate, self.weight_decay, self.optimizer = learning_rate, weight_decay, optimizer
        self.lr_scheduler, self.warmup = lr_scheduler, warmup
        self.model: Any = model if built else None
        # A checkpoint has weights, so that a module made from one needs no folder.
        model = config_values(self.config, self._generation)
        self.save_hyperparameters()

    # ---- the model ------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build the model; that of a folder gets the weights in it."""
        if self.model is None:
            self.model = build_model(self._class, self.config, self._generation)
            if self._folder is not None:
                self.load_pretrained(self._folder)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens by ``generate`` of the model, with the same arguments and results.

        Collective under a strategy that shards weights: all ranks call it the same number of times, each with any
        prompts of its own. A rank without prompts passes a tensor ``[0, length]``, which is returned. May be called in
        steps, hooks and callbacks.
        """
        return self.model.generate(*args, **kwargs)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def batch_weight(self, batch: Mapping[str, Any]) -> int | Tensor:
        """Return the number of labels that the loss of a batch counts: tokens, or rows."""
        if (shifted := batch.get("shift_labels")) is not None:
            return shifted.ne(IGNORED).sum()  # type: ignore[no-any-return]
        labels = batch.get("labels")
        if labels is None or labels.is_floating_point():
            return len(next(iter(batch.values())))
        counted: Tensor = labels[..., 1:] if predicts_next_token(self.model) else labels
        return counted.ne(IGNORED).sum()

    def cut_sequences(self, batch: Any, part: SequencePart) -> Any:
        """Return this rank's part of a batch of a model that predicts the next token."""
        return _causal_part(self.model, batch, part) if part.cuts else batch

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """Return the loss of a batch, and log it as ``train_loss``."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log ``val_loss``, and at the end of the epoch ``val_perplexity`` of models that predict tokens."""
        self._log_loss("val", batch)

    def test_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log ``test_loss``, and at the end of the epoch ``test_perplexity`` of models that predict tokens."""
        self._log_loss("test", batch)

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return the tensors of the model's output that are named logits, by name."""
        outputs = self.model(**{name: value for name, value in batch.items() if name != "labels"})
        return {name: value for name, value in outputs.items() if "logits" in name}

    def loss(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the model's loss of a batch, a 0-d tensor.

        Raises:
            LoopError: the model returns none, as the batch has no labels.
        """
        loss: Tensor | None = self.model(**batch).loss
        if loss is None:
            raise LoopError(
                f"{type(self.model).__name__} returned no loss for a batch with {', '.join(batch)}: add labels to it, "
                "for example with DataCollatorForLanguageModeling(tokenizer, mlm=False)."
            )
        return loss

    def on_validation_epoch_end(self) -> None:
        """Log the perplexity."""
        self._log_perplexity("val")

    def on_test_epoch_end(self) -> None:
        """Log the perplexity."""
        self._log_perplexity("test")

    def _log_loss(self, stage: str, batch: Mapping[str, Any]) -> None:
        loss, weight = self.loss(batch), torch.as_tensor(self.batch_weight(batch))
        # The mean over no labels is NaN, which would stay NaN with a weight of zero.
        loss = torch.where(weight.to(loss.device) > 0, loss, 0.0)
        self.log(f"{stage}_loss", loss, prog_bar=True, batch_size=weight)

    def _log_perplexity(self, stage: str) -> None:
        if not predicts_tokens(self.model):
            return
        for name, loss in self.trainer.callback_metrics.items():
            if name.partition("/")[0] == f"{stage}_loss":
                # The loss is the same on all ranks, and so its largest value is exact.
                self.log(name.replace("loss", "perplexity", 1), loss.double().exp(), reduce_fx="max")

    # ---- the optimizer ----------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        """Return the optimizer of all parameters that require gradients, and the schedule if one was chosen.

        Matrices alone have weight decay.
        """
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [one for one in trained if one.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = self.optimizer([group for group in groups if group["params"]], lr=self.learning_rate)
        if self.lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.lr_scheduler, "warmup": self.warmup}


def _causal_part(model: Any, batch: Mapping[str, Any], part: SequencePart) -> dict[str, Tensor]:
    """Return this rank's part of a batch: tokens, their positions, and labels that are shifted already.

    Raises:
        ConfigurationError: the model does not predict the next token.
        DataError: the batch has other entries, or padding at the start.
    """
    if not predicts_next_token(model):
        raise ConfigurationError(
            f"parallel={{'cp': {part.size}}} with {type(model).__name__}: TransformersModule cuts the sequences of "
            "models that predict the next token. Derive a class that overrides cut_sequences, or leave cp out."
        )
    others = [name for name in batch if name not in _CUT]
    if others or "labels" not in batch:
        raise DataError(
            f"a batch with {', '.join(batch)}: TransformersModule cuts {', '.join(_CUT)}, and needs labels. Leave "
            "other entries out, or derive a class that overrides cut_sequences."
        )
    mask = batch.get("attention_mask")
    if mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise DataError(
            "a batch whose attention_mask begins with padding: under parallel={'cp': ...} sequences are padded at the "
            "end, where causal attention needs no mask. Set tokenizer.padding_side = 'right'."
        )
    tokens, labels = batch["input_ids"], batch["labels"]
    targets = part(torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1))
    positions = part.positions(tokens).expand(len(tokens), -1)
    return {"input_ids": part(tokens), "position_ids": positions, "labels": targets, "shift_labels": targets}
