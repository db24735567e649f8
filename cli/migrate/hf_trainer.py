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
_OTHERS = (
    "transformers.Seq2SeqTrainer",
    "transformers.Seq2SeqTrainingArguments",
    "transformers.HfArgumentParser",
    "transformers.TrainerCallback",
)
_KNOWN = {"model", "args", "train_dataset", "eval_dataset", "data_collator", "tokenizer", "processing_class"}
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
        arguments = Arguments(source, given.call, given.arguments, outcome)
        self._translated = arguments.translated()
        if parts := [*self._refused(outcome), *arguments.unclear]:
            raise CannotTranslate(*parts)
        self._class, self._module = free_name(source, "MigratedModule"), free_name(source, "module")
        self._loader, self._eval_loader = free_name(source, "train_loader"), free_name(source, "eval_loader")
        self._collate = free_name(source, "MigratedCollator")

    def _refused(self, outcome: Outcome) -> list[tuple[cst.CSTNode, str]]:
        """Return the parts of the Trainer's call, and the uses of its arguments, that are not translated."""
        given, call = self._trainer.arguments, self._trainer.call
        needed = ("model", "args", "train_dataset")
        parts: list[tuple[cst.CSTNode, str]] = [
            (call, f"the Trainer has no {name!r}") for name in needed if name not in given
        ]
        for name, argument in given.items():
            if name == "compute_metrics":
                reason = "compute_metrics was left out: log the metrics in validation_step."
                outcome.leave(self._source.line(argument), reason, TRANSFORMERS_PAGE)
            elif name not in _KNOWN:
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
        modules = ["inspect"] * found.filters_columns + ["math"] * ("math." in module)
        collator = [] if "data_collator" in self._trainer.arguments else ["transformers"]
        modules = [*modules, "phalanx", "torch", *collator]
        replace_imports(source, outcome, {*_TRAINER, *_ARGUMENTS}, modules, first)
        outcome.replace(*definitions, line)
        self._remark(outcome)

    def _replace(self, statement: cst.CSTNode, lines: list[str], outcome: Outcome) -> None:
        text = indented("\n".join(lines), self._source.indentation(statement), self._source.tree.default_newline)
        outcome.replace(self._source.span(statement), text, self._source.line(statement))

    def _remark(self, outcome: Outcome) -> None:
        """Leave what may change the numbers, although it was translated."""
        line = self._source.line(self._arguments.line)
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
