"""The state of a data module in checkpoints: that of rank 0, which every rank loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..checkpoint.codec import decode

if TYPE_CHECKING:
    from ..api.data_module import DataModule
    from ..checkpoint.reader import Checkpoint
    from ..run.run import Run


def data_module_state(datamodule: DataModule | None) -> dict[str, Any] | None:
    """Return the state of a data module and its class; None without state."""
    state = {} if datamodule is None else datamodule.state_dict()
    return {"class": type(datamodule).__qualname__, "state": state} if state else None


def restore_data_module(run: Run, checkpoint: Checkpoint | None) -> None:
    """Load the state of the data module. This precedes the request for its loaders, which may depend on it.

    A converted checkpoint of Lightning has the state under the name of the class, beside the user's own values.
    """
    if checkpoint is None:
        return
    datamodule, encoded = run.context.datamodule, checkpoint.document.get("state") or {}
    own = "" if datamodule is None else type(datamodule).__qualname__
    if encoded.get("datamodule"):
        saved = decode(encoded["datamodule"], checkpoint.read_section("state"))
    elif own and own in encoded.get("user", {}) and "converted" in checkpoint.document:
        saved = {"class": own, "state": decode(encoded["user"][own], checkpoint.read_section("state"))}
    else:
        return
    if datamodule is None or saved["class"] != own:
        run.note(
            f"{checkpoint.path} holds the state of the data module {saved['class']}, which this run does not have; it "
            "is not loaded."
        )
        return
    datamodule.load_state_dict(saved["state"])
