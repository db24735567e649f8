"""Errors of jsonargparse in one sentence each, with the closest known name."""

from __future__ import annotations

import re
from importlib import import_module
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ..core.arguments import advice_for, keywords_of
from ..core.errors import ConfigurationError, UnknownArgumentError, UnknownNameError, did_you_mean
from ..core.foreign_names import ARGUMENTS
from .class_paths import PLUGINS

if TYPE_CHECKING:
    from collections.abc import Callable

    from jsonargparse import ArgumentParser

_SECTIONS = {
    **ARGUMENTS["Trainer"],
    "ckpt_path": "it is not an argument of the Trainer: write it beside 'trainer'",
    "seed": "it is 'seed_everything', beside 'trainer'",
    "model": "it is a section of its own, beside 'trainer'",
    "datamodule": "it is the section 'data', beside 'trainer'",
    "lr": "it belongs to the section 'optimizer'",
    "learning_rate": "it belongs to the section 'optimizer', as 'lr'",
}
# Keys of a parser that a configuration does not have.
_OPTIONS = {"help", "config", "print_config", "print_shtab", "subcommand"}
# Parts of jsonargparse's messages, the specific ones first.
_CLASS = r"Problem with given class_path '(?P<path>[^']+)':\s+"
_KEY = r"(?:Parser key \"(?P<key>[^\"]+)\":)"
_TYPE = re.compile(r"Expected an? (?:<class '(?:\w+\.)*(\w+)'>|(\S+))")


def refusal(message: str, parser: ArgumentParser) -> ConfigurationError:
    """Return the error for a message of jsonargparse."""
    for pattern, build in _SENTENCES:
        if found := list(re.finditer(pattern, message)):
            return build(found[-1].groupdict(), message, parser)
    return ConfigurationError(" ".join(message.split()).rstrip(".") + ".")


def _unknown_option(found: dict[str, str], message: str, parser: ArgumentParser) -> ConfigurationError:
    """Return the error for a key that the parser of a stage does not have."""
    key = found["option"].lstrip("-").partition("=")[0].removesuffix("+")
    # On a command line a key is an option, in a file it is not.
    dashes = "--" if found["option"].startswith("--") else ""
    if (group := found.get("group")) is not None:
        key = f"{group}.{key}"
    known = _known_keys(parser)
    section, _, name = key.rpartition(".")
    within = [each.removeprefix(f"{section}.") for each in known if each.startswith(f"{section}.")] if section else []
    if within:
        sections = _SECTIONS if section == "trainer" else {}
        advice = advice_for(name, within, sections, f"{dashes}{section}.")
    elif namesakes := [each for each in known if each.rpartition(".")[2] == name and not section]:
        advice = f". Did you mean {dashes + namesakes[0]!r}?"
    else:
        root = key.partition(".")[0]
        advice = advice_for(root, sorted({each.partition(".")[0] for each in known} - _OPTIONS), prefix=dashes)
    return UnknownArgumentError(f"{dashes + key!r} is not known{advice}")


def _known_keys(parser: ArgumentParser) -> list[str]:
    """Return the keys of the parser, and of the stage that its arguments name."""
    actions = list(parser._actions)
    stages = getattr(parser._subcommands_action, "choices", None) or {}
    given = getattr(parser, "args", None) or []
    stage = next((stages[each] for each in given if each in stages), next(iter(stages.values()), None))
    if stage is not None:
        actions += stage._actions
    return [action.dest for action in actions]


def _unknown_in_class(found: dict[str, str], message: str, parser: ArgumentParser) -> ConfigurationError:
    """Return the error for an argument that the class of a ``class_path`` does not have."""
    kind = _load(found["path"])
    names = [name for base in getattr(kind, "__mro__", [kind]) for name in _arguments_of(base)]
    advice = advice_for(found["option"], list(dict.fromkeys(names)))
    return UnknownArgumentError(
        f"{_outer_key(message)}.{found['option']} is not an argument of {found['path']}{advice}"
    )


def _arguments_of(kind: Any) -> list[str]:
    try:
        return keywords_of(kind.__init__)
    except (TypeError, ValueError):
        return []


def _missing(found: dict[str, str], message: str, parser: ArgumentParser) -> ConfigurationError:
    names = ", ".join(repr(each.rpartition("fit.")[2]) for each in re.split(r",\s*", found["names"].strip()))
    where = f" of {found['path']}" if found.get("path") else ""
    return ConfigurationError(f"{names}{where} must be given: write it into a configuration file, or as an option.")


def _no_class(found: dict[str, str], message: str, parser: ArgumentParser) -> ConfigurationError:
    """Return the error for a class path that cannot be imported."""
    path, key = found["path"], _outer_key(message)
    module, _, name = path.rpartition(".")
    if found["reason"].startswith("No module"):
        return ConfigurationError(f"{key}: class_path {path!r} cannot be imported: {found['reason']}.")
    hint = did_you_mean(name, [each for each in dir(_load(module)) if each[0].isupper()])
    return UnknownNameError(f"{key}: {module} has no {name!r}.{hint}")


def _no_name(found: dict[str, str], message: str, parser: ArgumentParser) -> ConfigurationError:
    """Return the error for a class that was given by its bare name, or for a value of another type."""
    key, given = _outer_key(message), found["given"].strip()
    names = list(PLUGINS.get(key.removeprefix("trainer."), ()))
    base = re.search(r"Subtypes: .*?<class '([\w.]+)'>", message)
    kinds = _subclasses(_load(base[1])) if base else []
    # The name of a plug-in, rather than that of its class, is the one that the documentation teaches.
    hint = did_you_mean(given, [*kinds, *names])
    return UnknownNameError(
        f"{key}={given!r} is not known.{hint or ' Give the path of a class, as package.module.Class.'}"
    )


def _subclasses(kind: Any) -> list[str]:
    found: list[type[Any]] = kind.__subclasses__() if isinstance(kind, type) else []
    names = [name for each in found for name in (each.__name__, *_subclasses(each))]
    return [name for name in names if not name.startswith("_")]


def _wrong_class(found: dict[str, str], message: str, parser: ArgumentParser) -> ConfigurationError:
    return ConfigurationError(f"{_outer_key(message)}: {found['path']} does not derive from {found['base']}.")


def _wrong_type(found: dict[str, str], message: str, parser: ArgumentParser) -> ConfigurationError:
    """Return the error for a value that is not of the type of its argument."""
    inner = _innermost(message)
    outer, key = _outer_key(message), found["key"]
    name = outer if key == outer or outer.endswith(f".{key}") else f"{outer}.{key}"
    kinds = list(dict.fromkeys(one or other for one, other in _TYPE.findall(inner)))
    named = " or ".join("null" if each == "NoneType" else each for each in kinds if each not in ("path", "dot"))
    value = re.search(r"(?:Given value|Got value): (.*)", inner)
    return ConfigurationError(f"{name}={value[1].strip() if value else '...'} must be of type {named or 'another'}.")


def _innermost(message: str) -> str:
    """Return the lines about the last key of a message, which are indented further than the key's own."""
    before, _, found = message.rpartition("Parser key")
    indent = len(before.rpartition("\n")[2])
    first, *lines = found.splitlines()
    return "\n".join([first, *takewhile(lambda line: len(line) - len(line.lstrip()) > indent, lines)])


def _outer_key(message: str) -> str:
    found = re.search(_KEY, message)
    return found["key"] if found else "the configuration"


def _no_file(found: dict[str, str], message: str, parser: ArgumentParser) -> ConfigurationError:
    return ConfigurationError(f"the configuration {found['path']!r} does not exist.")


def _no_stage(found: dict[str, str], message: str, parser: ArgumentParser) -> ConfigurationError:
    known = re.findall(r"\w+", found["known"])
    given = found.get("given")
    head = "a command must be given" if given is None else f"{given!r} is not a command"
    hint = "" if given is None else did_you_mean(given, known)
    return UnknownNameError(f"{head}.{hint} Known: {', '.join(known)}.")


def _bad_syntax(found: dict[str, str], message: str, parser: ArgumentParser) -> ConfigurationError:
    places = re.findall(r"line (\d+), column (\d+)", message)
    where = f" in line {places[-1][0]}, column {places[-1][1]}" if places else ""
    reason = re.sub(r"\s*in \"<[^>]+>\", line \d+, column \d+:?", ";", found["reason"])
    return ConfigurationError(f"the configuration is not YAML{where}: {' '.join(reason.split()).strip('; ')}.")


def _no_sections(found: dict[str, str], message: str, parser: ArgumentParser) -> ConfigurationError:
    return ConfigurationError("a configuration must consist of sections, such as 'model:' and 'trainer:'.")


def _load(path: str) -> Any:
    """Return the module or class of a path that jsonargparse has imported."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name) if module else import_module(path)
    except (ImportError, AttributeError):
        return import_module(path)


_SENTENCES: tuple[tuple[str, Callable[[dict[str, str], str, Any], ConfigurationError]], ...] = (
    (r"Problems parsing config: (?P<reason>(?s:.*))", _bad_syntax),
    (r"Unexpected config:", _no_sections),
    (r"File does not exist: '(?P<path>[^']*)'", _no_file),
    (rf"{_CLASS}Option '(?P<option>[^']+)' is not accepted", _unknown_in_class),
    (rf"{_CLASS}the following arguments are required: (?P<names>.+)", _missing),
    (rf"{_CLASS}(?P<reason>No module named '[^']+'|module '[^']+' has no attribute '[^']+')", _no_class),
    (r"Import path (?P<path>\S+) does not correspond to a subclass of (?P<base>\w+)", _wrong_class),
    (r"unrecognized arguments: (?P<option>\S+)", _unknown_option),
    (r"Subcommand '\w+' does not accept option '(?P<option>[^']+)'", _unknown_option),
    (r"Group '(?P<group>[^']+)' does not accept option '(?P<option>[^']+)'", _unknown_option),
    (r"Option '(?P<option>[^']+)' is not accepted", _unknown_option),
    (r"the following arguments are required: (?P<names>.+)", _missing),
    (r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<known>.*)\)", _no_stage),
    (r"expected \"subcommand\" to be one of \{(?P<known>.*)\}", _no_stage),
    (rf"{_CLASS}{_KEY}", _wrong_type),
    (r"Expected a dot import path string: (?P<given>.*)", _no_name),
    (_KEY, _wrong_type),
)
