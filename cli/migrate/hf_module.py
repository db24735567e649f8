"""The text of the module, the collator and the optimizer that take the place of transformers' Trainer."""

from __future__ import annotations

from .hf_arguments import Translated

_MODULE = '''class {name}(phalanx.TrainModule):
    """A model of transformers, whose forward returns the loss, with the optimizer of its TrainingArguments."""

    def __init__(self, model{extras}, **options):
        super().__init__()
        self.model = model{kept_extras}
        self.options = options  # of the optimizer

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

{validation}
    def configure_optimizers(self):
{optimizer}


'''
_VALIDATION = """    def validation_step(self, batch, batch_idx):
        size = len(next(iter(batch.values())))
        self.log("eval_loss", self.model(**batch).loss, prog_bar=True, batch_size=size)
"""
# Rows are kept in a hook, which is not called for the batches that a rank repeats while it waits for others.
_VALIDATION_WITH_METRICS = """    def validation_step(self, batch, batch_idx):
        size = len(next(iter(batch.values())))
        outputs = self.model(**batch)
        self.log("eval_loss", outputs.loss, prog_bar=True, batch_size=size)
        config = getattr(self.model, "config", None)
        ignored = ["loss", *getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])]
        predictions = tuple(value for name, value in outputs.items() if name not in ignored)
        return (predictions[0] if len(predictions) == 1 else predictions, batch["labels"])

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.rows.append(transformers.trainer_pt_utils.nested_numpify(outputs))

    def on_validation_epoch_end(self):
        rows = [row for rank in self.trainer.world.all_gather_object(self.rows) for row in rank]
        self.rows = []
        predictions, labels = functools.reduce(transformers.trainer_pt_utils.nested_concat, rows)
        metrics = self.compute_metrics(transformers.EvalPrediction(predictions, labels))
        for name, value in metrics.items():
            self.log(name if name.startswith("eval_") else f"eval_{name}", float(value), prog_bar=True)
"""
_COLLATOR = '''class {name}:
    """Collates rows without the columns that the model's forward does not take."""

    def __init__(self, model, collator):
        self.names = {{*inspect.signature(model.forward).parameters, "label", "label_ids"}}
        self.collator = collator

    def __call__(self, rows):
        return self.collator([self.filtered(row) for row in rows])

    def filtered(self, row):
        return {{name: row[name] for name in row if name in self.names}} if hasattr(row, "keys") else row


'''
_GROUPS = """        decayed = [p for p in self.parameters() if p.requires_grad and p.dim() > 1]
        others = [p for p in self.parameters() if p.requires_grad and p.dim() <= 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
"""
_SCHEDULE = """        steps = self.trainer.estimated_stepping_batches
        warmup = {warmup}

        def factor(step):
            return step / max(1, warmup) if step < warmup else {after}

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {{"optimizer": optimizer, "lr_scheduler": {{"scheduler": scheduler, "interval": "step"}}}}"""
_AFTER_WARMUP = {
    "linear": "max(0.0, (steps - step) / max(1, steps - warmup))",
    "cosine": "max(0.0, 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))",
    "constant_with_warmup": "1.0",
}


def module_text(found: Translated, name: str, collator: str) -> str:
    """Return the definition of the module, and of the collator if the program has one."""
    extras = ["warmup_ratio"] * bool(found.warmup_ratio) + ["compute_metrics"] * bool(found.metrics)
    kept = [f"self.{extra} = {extra}" for extra in extras] + ["self.rows = []"] * bool(found.metrics)
    text = _MODULE.format(
        name=name,
        validation=_VALIDATION_WITH_METRICS if found.metrics else _VALIDATION,
        optimizer=_optimizer(found),
        extras="".join(f", {extra}" for extra in extras),
        kept_extras="".join(f"\n{' ' * 8}{line}" for line in kept),
    )
    return (_COLLATOR.format(name=collator) if found.filters_columns else "") + text


def module_arguments(found: Translated) -> dict[str, str]:
    """Return the arguments of the module beside the model."""
    given = found.optimizer
    extras = {"warmup_ratio": found.warmup_ratio, "compute_metrics": found.metrics}
    options = {name: text for name, text in extras.items() if text}
    options |= {"lr": given.get("learning_rate", "5e-5"), "weight_decay": given.get("weight_decay", "0.0")}
    if {"adam_beta1", "adam_beta2"} & set(given):
        options["betas"] = f"({given.get('adam_beta1', '0.9')}, {given.get('adam_beta2', '0.999')})"
    if "adam_epsilon" in given:
        options["eps"] = given["adam_epsilon"]
    return options


def has_decay(found: Translated) -> bool:
    """Whether weights decay, which transformers restricts to some of them."""
    return found.optimizer.get("weight_decay", "0.0") not in ("0", "0.0")


def _optimizer(found: Translated) -> str:
    """Return the body of ``configure_optimizers``."""
    groups = "groups" if has_decay(found) else "self.parameters()"
    lines = _GROUPS if has_decay(found) else ""
    lines += f"        optimizer = torch.optim.AdamW({groups}, **self.options)\n"
    warmup = "math.ceil(steps * self.warmup_ratio)" if found.warmup_ratio else str(found.warmup_steps)
    if found.schedule == "constant" or (found.schedule == "constant_with_warmup" and warmup == "0"):
        return f"{lines}        return optimizer"
    return lines + _SCHEDULE.format(warmup=warmup, after=_AFTER_WARMUP[found.schedule])
