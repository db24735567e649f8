"""Redaction of secrets: hyperparameters and environment variables whose names mark them as secret."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

MASK = "***"
_ALWAYS = {"secret", "secrets", "password", "passwords", "passwd", "passphrase", "credential", "credentials"}
# In training, most keys and tokens are not credentials: `pad_token`, `sort_key`, `max_tokens`.
_PERHAPS = {"token", "tokens", "key", "keys", "apikey"}
# An option with such a word and one of those above is one.
_OF_ACCESS = {"api", "access", "auth", "hf", "wandb"}
_LEAST_CHARACTERS = 16
# Shorter values would match in unrelated words.
_LEAST_IN_TEXT = 6


def is_secret(name: str, value: object) -> bool:
    """Whether a value must not be written: a password or secret by name, or a key or token that looks like one.

    A key or token is a text of at least 16 characters, without spaces, with letters and digits.
    """
    if not isinstance(value, str) or not value:
        return False
    words = set(re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()))
    looks = len(value) >= _LEAST_CHARACTERS and re.fullmatch(r"(?=.*[A-Za-z])(?=.*\d)\S+", value) is not None
    return bool(words & _ALWAYS) or (looks and bool(words & _PERHAPS))


def without_secret_options(command: str) -> str:
    """Return a command, as a shell reads it, with ``***`` in place of the values of secret options."""
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    shown = list(words)
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if equals and _has_addresses(name):
            shown[place] = f"{name}={without_paths(value)}"
        elif equals and _is_secret_option(name, value):
            shown[place] = f"{name}={MASK}"
        elif place and _has_addresses(words[place - 1]):
            shown[place] = without_paths(word)
        elif not equals and place + 1 < len(words) and name.startswith("--") and not words[place + 1].startswith("-"):
            shown[place + 1] = MASK if _is_secret_option(name, words[place + 1]) else words[place + 1]
    return command if shown == words else shlex.join(shown)


def _has_addresses(option: str) -> bool:
    """Whether an option has addresses, the paths of which are secret: ``--trainer.notify``."""
    return option.startswith("--") and option.rpartition(".")[2].lstrip("-").rstrip("+") == "notify"


def without_paths(text: str) -> str:
    """Return a text in which the URLs of HTTP are without what may be secret in them."""
    return re.sub(r"https?://[^\s'\",\]]+", lambda match: without_path(match[0]), text)


def without_path(address: str) -> str:
    """Return the beginning of a URL, with ``***`` in place of all that may be secret: user, path and query."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*://)(?:[^/?#@]*@)?([^/?#@\s]*)(.?)", address)
    if match is None:
        return MASK
    return f"{match[1]}{match[2]}{f'/{MASK}' if match[3] else ''}"


def _is_secret_option(name: str, value: str) -> bool:
    words = set(re.findall(r"[a-z]+", name.lower()))
    return is_secret(name, value) or "apikey" in words or bool(words & _PERHAPS and words & _OF_ACCESS)


def holds_secret(name: str, value: object) -> bool:
    """Whether a value is secret, or a mapping that contains a secret value."""
    inner = _inner(value)
    if inner is not None:
        return any(holds_secret(str(key), one) for key, one in inner.items())
    return is_secret(name, value)


def without_secrets(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with ``***`` in place of secret values."""
    shown: dict[str, Any] = {}
    for name, value in params.items():
        inner = _inner(value)
        if inner is not None:
            shown[name] = without_secrets(inner)
        else:
            shown[name] = MASK if is_secret(str(name), value) else value
    return shown


def _inner(value: object) -> Mapping[str, Any] | None:
    """Return the entries of a nested value, or None."""
    if isinstance(value, Namespace):
        return vars(value)
    return value if isinstance(value, Mapping) else None


def hiding(variables: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that replaces the values of secret variables in a text by ``***``.

    A variable is secret if its name contains TOKEN, KEY, SECRET or PASSWORD, and its value has at least 6 characters.
    """
    found = {
        value
        for name, value in variables.items()
        if re.search("TOKEN|KEY|SECRET|PASSWORD", name.upper()) and len(value) >= _LEAST_IN_TEXT
    }
    if not found:
        return lambda text: text
    pattern = re.compile("|".join(re.escape(value) for value in sorted(found, key=len, reverse=True)))
    return lambda text: pattern.sub(MASK, text)
