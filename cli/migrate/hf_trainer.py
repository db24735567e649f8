"""Programs with the Trainer of transformers: one model, one ``TrainingArguments``, data sets and ``train()``."""

from __future__ import annotations

import libcst as cst

from .counterparts import translate_or_list
from .edits import TRANSFORMERS_PAGE, Outcome
from .hf_arguments import Arguments
from .hf_counterparts import TRANSFORMERS
from .hf_module import has_decay, module_arguments, module_text
from .program import (
    CannotTranslate,
    before_comments,
    call_text,
    free_name,
    indented,
    is_called,
    is_statement,
    method_call,
    replace_imports,
    require_same_block,
    the_call,
    top_level,
    uses_of,
)
from .source import Source, literal

_TRAINER = ("transformers.Trainer", "transformers.trainer.Trainer")
_ARGUMENTS = ("transformers.TrainingArguments", "transformers.training_args.TrainingArguments")
_EARLY_STOPPING = ("transformers.EarlyStoppingCallback", "transformers.trainer_callback.EarlyStoppingCallback")
_BEST_METRIC = ("metric_for_best_model", "greater_is_better")
_OTHERS = (
    "transformers.Seq2SeqTrainer",
    "transformers.Seq2SeqTrainingArguments",
    "transformers.HfArgumentParser",
    "transformers.TrainerCallback",
)
_KNOWN = {"model", "args", "train_dataset", "eval_dataset", "data_collator", "tokenizer", "processing_class"}
_KNOWN |= {"compute_metrics", "callbacks"}
# Values of an evaluation that a Trainer of transformers adds to the metrics.
_ADDED = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
_NO_COUNTERPART = "has no counterpart that is certain to mean the same"


def migrate_hf_trainer(source: Source, outcome: Outcome) -> None:
    """Translate the program if all of it has a counterpart; otherwise leave its parts, with what replaces them."""
    if not any(is_called(source, node, (*_TRAINER, *_ARGUMENTS, *_OTHERS)) for node in source.references()):
        return

    def translate(translated: Outcome) -> None:
        _refuse_others(source)
        _Program(source, translated).translate(translated)

    translate_or_list(source, outcome, TRANSFORMERS, translate)


def _refuse_others(source: Source) -> None:
    """Raise ``CannotTranslate`` if classes are derived from transformers' ones, or others than the Trainer are used."""
    parts = [
        (each, f"{each.name.value} overrides methods of transformers")
        for each in source.walk(cst.ClassDef)
        if any(is_called(source, base.value, (*_TRAINER, *_OTHERS)) for base in each.bases)
    ]
    calls = [call for call in source.walk(cst.Call) if is_called(source, call.func, _OTHERS)]
    parts += [(call, f"{source.code(call.func)} has no counterpart") for call in calls]
    if parts:
        raise CannotTranslate(*parts)


class _Program:
    """One script with one Trainer."""

    def __init__(self, source: Source, outcome: Outcome) -> None:
        self._source = source
        self._trainer = the_call(source, _TRAINER, "Trainer")
        self._arguments = the_call(source, _ARGUMENTS, "TrainingArguments")
        require_same_block(source, self._arguments.line, self._trainer.line)
        given = self._arguments
        stops = "callbacks" in self._trainer.arguments
        arguments = Arguments(source, given.call, given.arguments, outcome, _BEST_METRIC if stops else ())
        self._translated = arguments.translated()
        self._unclear: list[tuple[cst.CSTNode, str]] = []
        if stops and (callbacks := self._callbacks(self._trainer.arguments["callbacks"])):
            self._translated.settings["callbacks"] = callbacks
        if "compute_metrics" in self._trainer.arguments:
            self._translated.metrics = self._code("compute_metrics")
            # Metrics of a few batches may not be defined.
            self._translated.settings["num_sanity_val_steps"] = "0"
        if parts := [*self._refused(), *self._unclear, *arguments.unclear]:
            raise CannotTranslate(*parts)
        self._class, self._module = free_name(source, "MigratedModule"), free_name(source, "module")
        self._loader, self._eval_loader = free_name(source, "train_loader"), free_name(source, "eval_loader")
        self._collate = free_name(source, "MigratedCollator")

    def _callbacks(self, argument: cst.Arg) -> str:
        """Return the callbacks in phalanx; empty if they are others than one that stops early, or not certain."""
        given = argument.value
        calls = [each.value for each in given.elements] if isinstance(given, cst.List) else [given]
        settings = self._arguments.arguments
        best, greater = (literal(settings[name].value) if name in settings else None for name in _BEST_METRIC)
        stopping = self._stopping(calls[0]) if len(calls) == 1 else None
        if stopping is None:
            self._unclear.append((argument, f"Trainer(callbacks=...) {_NO_COUNTERPART}"))
        elif not isinstance(best, str) or greater not in (None, True, False):
            reason = "EarlyStoppingCallback needs metric_for_best_model, as text in TrainingArguments"
            self._unclear.append((argument, reason))
        else:
            grows = not best.endswith("loss") if greater is None else greater
            metric, mode = best if best.startswith("eval_") else f"eval_{best}", "max" if grows else "min"
            return f'[phalanx.callbacks.EarlyStopping("{metric}", mode="{mode}", patience={stopping})]'
        return ""

    def _stopping(self, call: cst.BaseExpression) -> str | None:
        """Return the patience of an ``EarlyStoppingCallback`` without a threshold; None for anything else."""
        if not isinstance(call, cst.Call) or not is_called(self._source, call.func, _EARLY_STOPPING):
            return None
        names = ("early_stopping_patience", "early_stopping_threshold")
        given = {each.keyword.value if each.keyword else names[i]: each for i, each in enumerate(call.args[:2])}
        # The best value is another one there, if a small improvement does not count.
        if given.keys() - set(names) or (names[1] in given and literal(given[names[1]].value) not in (0, None)):
            return None
        return self._source.code(given[names[0]].value) if names[0] in given else "1"

    def _refused(self) -> list[tuple[cst.CSTNode, str]]:
        """Return the parts of the Trainer's call, and the uses of its arguments, that are not translated."""
        given, call = self._trainer.arguments, self._trainer.call
        needed = ("model", "args", "train_dataset")
        parts: list[tuple[cst.CSTNode, str]] = [
            (call, f"the Trainer has no {name!r}") for name in needed if name not in given
        ]
        for name, argument in given.items():
            if name not in _KNOWN:
                parts.append((argument, f"Trainer({name}=...) {_NO_COUNTERPART}"))
        own = given["args"].value if "args" in given else None
        others = [use for use in uses_of(self._source, self._arguments.name) if use is not own]
        return parts + [(use, "TrainingArguments are used elsewhere too") for use in others]

    # ---- edits ---------------------------------------------------------------------------------------------------

    def translate(self, outcome: Outcome) -> None:
        source, found = self._source, self._translated
        for use in uses_of(source, self._trainer.name):
            self._translate_use(use, outcome)
        first = top_level(source, self._arguments.line)
        start = before_comments(source, first)
        module = module_text(found, self._class, self._collate).replace("\n", source.tree.default_newline)
        line = source.line(self._arguments.line)
        space = "" if source.text[:start].endswith(b"\n\n\n") else source.tree.default_newline
        definitions = (start, start), f"{space}{module}"
        outcome.replace(source.span(self._arguments.line.body[0]), f"phalanx.seed_everything({found.seed})", line)
        self._replace(self._trainer.line, self._lines(), outcome)
        modules = [name for name in ("functools", "inspect", "math") if f"{name}." in module]
        needs_library = "transformers." in module or "data_collator" not in self._trainer.arguments
        modules = [*modules, "phalanx", "torch", *["transformers"] * needs_library]
        replace_imports(source, outcome, {*_TRAINER, *_ARGUMENTS, *_EARLY_STOPPING}, modules, first)
        outcome.replace(*definitions, line)
        self._remark(outcome)

    def _replace(self, statement: cst.CSTNode, lines: list[str], outcome: Outcome) -> None:
        text = indented("\n".join(lines), self._source.indentation(statement), self._source.tree.default_newline)
        outcome.replace(self._source.span(statement), text, self._source.line(statement))

    def _remark(self, outcome: Outcome) -> None:
        """Leave what may change the numbers, although it was translated."""
        line = self._source.line(self._arguments.line)
        for string in self._source.walk(cst.SimpleString):
            if literal(string) in _ADDED:
                reason = f"{string.value} is not among the metrics that validate returns: trainer.throughput has rates."
                outcome.leave(self._source.line(string), reason, TRANSFORMERS_PAGE)
        if "accumulate_grad_batches" in self._translated.settings:
            reason = "the loss is the mean over micro-batches: return the number of tokens from batch_weight if they"
            outcome.leave(line, f"{reason} count.", TRANSFORMERS_PAGE)
        if has_decay(self._translated):
            reason = (
                "weight_decay is for the parameters with two and more dimensions, which are all but biases and norms"
            )
            outcome.leave(line, f"{reason} in most models.", TRANSFORMERS_PAGE)

    def _lines(self) -> list[str]:
        """Return the statements in place of the one that creates the Trainer."""
        found, code, collate = self._translated, self._code, self._collator()
        loader = "torch.utils.data.DataLoader"
        lines = [
            call_text(f"{self._module} = {self._class}", [code("model")], module_arguments(found)),
            call_text(f"{self._loader} = {loader}", [code("train_dataset")], {**found.train_loader, **collate}),
        ]
        if "eval_dataset" in self._trainer.arguments:
            arguments = {**found.eval_loader, **collate}
            lines.append(call_text(f"{self._eval_loader} = {loader}", [code("eval_dataset")], arguments))
        return [*lines, call_text(f"{self._trainer.name} = phalanx.Trainer", [], found.settings)]

    def _collator(self) -> dict[str, str]:
        given = self._trainer.arguments
        if "data_collator" in given:
            text = self._code("data_collator")
        elif tokenizer := self._tokenizer():
            text = f"transformers.DataCollatorWithPadding({tokenizer})"
        else:
            text = "transformers.default_data_collator"
        if self._translated.filters_columns:
            text = f"{self._collate}({self._code('model')}, {text})"
        return {"collate_fn": text}

    def _tokenizer(self) -> str | None:
        given = self._trainer.arguments
        return next((self._code(name) for name in ("processing_class", "tokenizer") if name in given), None)

    def _code(self, name: str) -> str:
        return self._source.code(self._trainer.arguments[name].value)

    # ---- calls of the Trainer's methods --------------------------------------------------------------------------

    def _translate_use(self, use: cst.Name, outcome: Outcome) -> None:
        called = method_call(self._source, use)
        lines = self._method(*called) if called is not None else None
        if called is None or lines is None:
            used = self._source.parent(use) if isinstance(self._source.parent(use), cst.Attribute) else use
            raise CannotTranslate((use, f"{self._source.code(used or use)} {_NO_COUNTERPART}"))
        require_same_block(self._source, self._trainer.line, called[1])
        self._replace(called[1], lines, outcome)

    def _method(self, method: str, call: cst.Call) -> list[str] | None:
        """Return the lines in place of a call of one of the Trainer's methods; None if there are none."""
        trainer, has_evaluation = self._trainer.name, "eval_dataset" in self._trainer.arguments
        if method == "evaluate" and not call.args and has_evaluation:
            return [f"{trainer}.validate({self._module}, {self._eval_loader})[0]"]
        if not is_statement(self._source, call):
            return None
        if method == "train" and (resumed := self._resumed(call)) is not None:
            loaders = [self._loader] + [self._eval_loader] * (has_evaluation and self._translated.evaluates)
            return [f"{trainer}.fit({', '.join([self._module, *loaders])}{resumed})"]
        if method == "save_model" and len(call.args) <= 1:
            root = self._translated.settings.get("default_root_dir", '"trainer_output"')
            path = self._source.code(call.args[0].value) if call.args else root
            saved = [f"{self._module}.model", *filter(None, [self._tokenizer()])]
            return [f"if {trainer}.is_global_zero:", *(f"    {each}.save_pretrained({path})" for each in saved)]
        return None

    def _resumed(self, call: cst.Call) -> str | None:
        """Return the argument that resumes, empty if the call does not; None for an argument of another kind."""
        if not call.args:
            return ""
        keyword = call.args[0].keyword
        if len(call.args) > 1 or keyword is None or keyword.value != "resume_from_checkpoint":
            return None
        value = literal(call.args[0].value)
        return {True: ', ckpt_path="auto"', False: "", None: ""}.get(value) if value in (True, False, None) else None
