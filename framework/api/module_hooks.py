"""The steps and hooks that a ``TrainModule`` may override. Hooks that are not overridden cost nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch.optim import Optimizer

    from ..fabric.fabric import Fabric
    from ..parallel.sequence_part import SequencePart
    from .contracts import CallbackContract


class ModuleHooks(nn.Module):
    """The steps and hooks that a ``TrainModule`` may override."""

    if TYPE_CHECKING:

        @property
        def fabric(self) -> Fabric: ...
        def clip_gradients(
            self,
            optimizer: Optimizer,
            gradient_clip_val: int | float | None = None,
            gradient_clip_algorithm: str | None = None,
        ) -> Tensor | None: ...

    # ---- steps ----------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | Mapping[str, Any] | None:
        """Return the loss of a micro-batch, a 0-d tensor with the mean over its items, or a mapping with ``"loss"``.

        Returning None skips this micro-batch; its weight stays in the mean. Any subset of ranks may return None.
        """
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch; with several loaders also takes ``dataloader_idx=0``."""

    def test_step(self, batch: Any, batch_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch."""

    def predict_step(self, batch: Any, batch_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Return predictions for one batch; the default calls the module on it."""
        return self(batch)

    def batch_weight(self, batch: Any) -> int | float | Tensor:
        """Return the number of items over which the batch's loss is averaged, such as its tokens without padding.

        The gradient of an optimizer step is that of the weighted mean over all micro-batches of its window, on all
        ranks.
        """
        return 1

    def cut_sequences(self, batch: Any, part: SequencePart) -> Any:
        """Return this rank's part of a batch: for ``parallel={"cp": ...}``, where ranks share the sequences of a batch.

        Called for every batch before anything else sees it, if it is defined: on a single rank too, where the part is
        all, so that steps see batches of the same form for any number of ranks. ``part(tensor, dim=1)`` cuts a tensor,
        and ``part.positions(tensor, dim=1)`` returns the positions of the part, for models that need them:
        ``return part(tokens), part(targets), part.positions(tokens)``. Targets are shifted before they are cut.
        ``batch_weight`` sees the part, and must count its targets.
        """
        raise NotImplementedError

    # ---- configuration --------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        """Return an optimizer, a list of them, ``(optimizers, schedulers)``, or a dict.

        The dict has ``optimizer`` and ``lr_scheduler``: a scheduler, or a dict with ``scheduler``, ``interval``
        (``"epoch"`` or ``"step"``), ``frequency`` and ``monitor``.
        """
        return None

    def configure_model(self) -> None:
        """Build large layers here, under the strategy's context. May be called twice: build only what is missing."""

    def configure_tensor_parallel(self, mesh: Any) -> Mapping[str, Any] | None:
        """Define how layers are split for tensor parallelism. Called when the strategy shards the weights.

        Return a plan for ``torch.distributed.tensor.parallel.parallelize_module``, such as
        ``{"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}``, or call ``parallelize_module``
        yourself and return None. Parameters have no data yet. Layers outside of the plan are computed
        identically by all ranks of a group, which see the same batches. Attributes that are changed here stay changed
        after the run.

        Args:
            mesh: the ``DeviceMesh`` of this rank's group, with one axis, ``"tensor"``.
        """
        raise NotImplementedError

    def configure_expert_parallel(self) -> Sequence[str | nn.Module]:
        """Return the layers of experts for expert parallelism, as names of submodules (``*`` is a wildcard) or modules.

        The parameters of such a layer are all stacked by expert, [experts, ...]. It is called as ``layer(hidden, index,
        weights)``: tokens [tokens, width], the numbers of their experts and the weights of these, both [tokens, top_k];
        and returns the weighted sums, [tokens, width]. The router is outside of the layer. Layers of models of
        transformers that have this form are found without this method.
        """
        raise NotImplementedError

    def configure_callbacks(self) -> Sequence[CallbackContract] | CallbackContract:
        """Return callbacks of this module; they replace the Trainer's callbacks of the same class."""
        return []

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients before an update; override to clip differently, with ``clip_gradients``."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    # ---- data -----------------------------------------------------------------------------------------------------

    prepare_data_per_node: bool = True
    """Whether ``prepare_data`` runs on one rank of each node; if False, on rank 0 alone."""
    allow_zero_length_dataloader_with_multiple_devices: bool = True
    """Accepted for modules written for Lightning: a rank without data always takes part with weight 0."""

    def prepare_data(self) -> None:
        """Download or write data; called on one rank of each node, before ``setup``."""

    def train_dataloader(self) -> Any:
        """Return the training loader, if none is passed to ``fit``."""

    def val_dataloader(self) -> Any:
        """Return one validation loader or several."""

    def test_dataloader(self) -> Any:
        """Return one test loader or several."""

    def predict_dataloader(self) -> Any:
        """Return one prediction loader or several."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device; override for batches that are not collections of tensors."""
        return self.fabric.to_device(batch)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to transfer."""
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to pass to the step."""
        return batch

    # ---- hooks, in the order of a fit -----------------------------------------------------------------------------

    def setup(self, stage: str) -> None: ...
    def teardown(self, stage: str) -> None: ...
    def on_fit_start(self) -> None: ...
    def on_fit_end(self) -> None: ...
    def on_train_start(self) -> None: ...
    def on_train_end(self) -> None: ...
    def on_train_epoch_start(self) -> None: ...
    def on_train_epoch_end(self) -> None: ...
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None: ...
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_before_zero_grad(self, optimizer: Optimizer) -> None: ...
    def on_before_backward(self, loss: Tensor) -> None: ...
    def on_after_backward(self) -> None: ...
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...
    def on_validation_start(self) -> None: ...
    def on_validation_end(self) -> None: ...
    def on_validation_epoch_start(self) -> None: ...
    def on_validation_epoch_end(self) -> None: ...
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_model_zero_grad(self) -> None: ...
    def on_validation_model_eval(self) -> None: ...
    def on_validation_model_train(self) -> None: ...
    def on_test_start(self) -> None: ...
    def on_test_end(self) -> None: ...
    def on_test_epoch_start(self) -> None: ...
    def on_test_epoch_end(self) -> None: ...
    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_model_eval(self) -> None: ...
    def on_test_model_train(self) -> None: ...
    def on_predict_start(self) -> None: ...
    def on_predict_end(self) -> None: ...
    def on_predict_epoch_start(self) -> None: ...
    def on_predict_epoch_end(self) -> None: ...
    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_model_eval(self) -> None: ...
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a weighted and scaled loss; override for your own backward pass.

        The weight is the batch's part of its window. Strategies that compute gradients themselves refuse an override.
        """
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Apply an update. Backward has already run; ``optimizer_closure`` returns its loss."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Drop the gradients of the last update."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Advance a scheduler."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)
