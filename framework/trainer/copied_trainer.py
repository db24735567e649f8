"""The state of a copy or a pickle of a Trainer: its arguments, and the outcome of its last stage."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import Session


def state_of_copy(session: Session, attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a copy of a Trainer.

    Process groups, writers and loaders belong to one Trainer. The copy creates its own.

    Args:
        session: the state of the Trainer.
        attributes: those that a subclass or a program has added.
    """
    given = {each.name: getattr(session.requested, each.name) for each in fields(session.requested)}
    if not isinstance(given["strategy"], str):
        given["strategy"] = given["strategy"].clone()
    outcome = session.outcome() if session.module is not None else None
    return {"given": given, "attributes": attributes, "outcome": outcome, "module": session.module}


def restore_copy(session: Session, state: dict[str, Any]) -> None:
    """Restore the outcome of the last stage in the Trainer of a copy."""
    if state["outcome"] is not None:
        session.take_outcome(state["outcome"])
        session.use_module(state["module"])
