"""``PretrainedWeights``: the side of ``TrainModule`` that asks for the weights of a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import nn

from ..core.arguments import names_arguments
from ..pretrained import given_at_once, load_alone
from ..pretrained.request import PretrainedRequest, check_copies, forget_waiting, initialize_rest, requested
from ..pretrained.transformers_models import empty_tensors


class PretrainedWeights(nn.Module):
    """Requests for pretrained weights, which a Trainer executes when the strategy has set the module up."""

    _pretrained_requests: tuple[PretrainedRequest, ...] = ()
    _pretrained_sources: tuple[dict[str, str], ...] = ()

    @names_arguments
    def load_pretrained(
        self, path: str | os.PathLike[str], into: nn.Module | str | None = None, *, strict: bool | None = None
    ) -> None:
        """Ask for the weights of a Hugging Face folder; call it in ``configure_model``, after the layers are built.

        The weights are read when the strategy has set the module up: each rank reads only its own part of each tensor,
        and casts it to the module's dtype. A tensor that a later line of ``configure_model`` copies, reads or changes
        is read in full at that line, and keeps the changes. Layers that the weights replace are neither initialized
        nor broadcast by strategies that shard parameters. A resumed fit loads its checkpoint instead, unless that
        leaves out frozen weights. A module that has been trained keeps its weights in later stages. A model of
        transformers that generates gets the folder's generation config at once.

        Args:
            path: a folder with ``model.safetensors``, or with its shards and ``model.safetensors.index.json``; a
                ``.safetensors`` file; or a checkpoint.
            into: the submodule that the weights are for, or its name. Default: the only model of transformers in this
                module, or this module.
            strict: whether all names and shapes must match. If False, only matching tensors are loaded. By default a
                model of transformers may have layers that the files lack, such as a new head, which keep their initial
                values, and the files may have others; both are reported. Other modules must match.

        Raises:
            ConfigurationError: an argument is invalid.
            CheckpointError: the generation config cannot be read.
        """
        request = requested(self, path, into, strict)
        # Now, so that later lines of configure_model may change it.
        if request.target is not None and not request.target.is_loaded:
            request.use_generation_config()
        self._pretrained_requests = (*self._pretrained_requests, given_at_once(self, request))

    @property
    def pretrained_sources(self) -> tuple[dict[str, str], ...]:
        """The sources of the pretrained weights: ``path``, ``headers`` (see ``phalanx.checkpoint.fingerprint``) and
        ``into``. Checkpoints hold them."""
        return self._pretrained_sources

    def use_sources(self, sources: Sequence[dict[str, str]]) -> None:
        """Record the sources of the weights. Called by the Trainer."""
        self._pretrained_sources = tuple(sources)

    def settle_pretrained(self) -> None:
        """Record which of the weights later lines of ``configure_model`` have changed. Called after it.

        Raises:
            ConfigurationError: a layer was copied or replaced that had no weights yet.
        """
        self._pretrained_requests = tuple(one.settled(self) for one in self._pretrained_requests)
        check_copies(self, self._pretrained_requests)

    def take_pretrained(self, path: str | None = None) -> list[PretrainedRequest]:
        """Return the requests to execute, and forget them. Called by the Trainer.

        Args:
            path: a further request, which is executed even if the module has weights.
        """
        pending, self._pretrained_requests = self._pretrained_requests, ()
        found = [one for one in pending if not any(target.is_loaded for target in one.targets(self))]
        if path is not None:
            found.append(requested(self, path, None, None))
            found[-1].use_generation_config()
        return found

    def load_requested(self) -> None:
        """Execute all requests in a module that no strategy has set up, in this process alone.

        Called before a checkpoint is loaded that leaves out frozen weights.

        Raises:
            CheckpointError: the weights cannot be read, or do not match the module.
        """
        requests = self.take_pretrained()
        if requests:
            load_alone(self, requests)

    def drop_pretrained(self, empty: set[int] | None = None) -> None:
        """Forget all requests, as the module gets other weights. Called before a checkpoint is loaded.

        Models of transformers without data are initialized.

        Args:
            empty: the ``id`` of each tensor without data. Default: of each one on the meta device.
        """
        requests, self._pretrained_requests = self._pretrained_requests, ()
        forget_waiting(self)
        for request in requests:
            request.targets(self)[0].mark_loaded()
        if requests:
            initialize_rest(self, empty_tensors(self) if empty is None else empty)
