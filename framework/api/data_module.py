"""``DataModule``: the data of an experiment and its loaders, separate from the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from ..core.absent_names import lacks
from ..core.arguments import NoArguments, check_names, keywords_of
from ..core.foreign_names import MEMBERS
from ..core.hyperparameters import HyperparametersMixin
from ..core.torch_internals import tree_map
from ..distributed.devices import copies_in_order
from .overriding import is_overridden

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from .contracts import TrainerView


@lacks(MEMBERS["DataModule"])
class DataModule(HyperparametersMixin, NoArguments):
    """Base class of data modules; override the loaders and hooks that you need.

    ``prepare_data`` runs on one rank of each node, then ``setup`` on all ranks, then the loaders are requested.
    """

    trainer: TrainerView | None = None
    prepare_data_per_node: bool = True
    """Whether ``prepare_data`` runs on one rank of each node; if False, on rank 0 alone."""
    allow_zero_length_dataloader_with_multiple_devices: bool = True
    """Accepted for modules written for Lightning: a rank without data always takes part with weight 0."""

    def __repr__(self) -> str:
        names = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
        return f"{type(self).__name__}({', '.join(name for name in names if self.provides(name))})"

    def attach(self, trainer: TrainerView) -> None:
        """Set ``trainer``. Called by the Trainer at the start of a stage."""
        self.trainer = trainer

    def prepare_data(self) -> None:
        """Download or write data; called on one rank of each node. Keep no state here: other ranks would lack it."""

    def setup(self, stage: str) -> None:
        """Create the datasets; ``stage`` is ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""

    def train_dataloader(self) -> Any:
        """Return the training loader: any loader that ``fit`` takes."""

    def val_dataloader(self) -> Any:
        """Return one validation loader or several."""

    def test_dataloader(self) -> Any:
        """Return one test loader or several."""

    def predict_dataloader(self) -> Any:
        """Return one prediction loader or several."""

    def teardown(self, stage: str) -> None:
        """Undo ``setup``; called on all ranks at the end of a stage."""

    def on_exception(self, exception: BaseException) -> None:
        """Release what ``setup`` has opened: the stage has ended with this error. No collective.

        Called after the callbacks' ``on_exception``, in place of ``teardown``. An exception of this hook is printed,
        and does not replace the error.
        """

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to transfer."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch on the device; override for batches that are not collections of tensors."""
        non_blocking = copies_in_order(device)
        return tree_map(lambda leaf: leaf.to(device, non_blocking=non_blocking) if hasattr(leaf, "to") else leaf, batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to pass to the step."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint: JSON values, tensors, and lists or dicts of them.

        It is that of rank 0; every rank of a resumed run loads it, also on another number of ranks.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned; called between ``setup`` and the loaders."""

    def provides(self, hook: str) -> bool:
        """Whether ``hook``, such as a loader, is overridden in the class or on this object; None switches it off."""
        return is_overridden(hook, self, DataModule)

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> Self:
        """Return a data module over datasets, each one dataset, or a list, tuple or dict of them.

        The training set is shuffled if it is map-style. ``kwargs`` go to the constructor, and so do ``batch_size`` and
        ``num_workers`` if it accepts them.

        Raises:
            UnknownArgumentError: the constructor does not accept one of ``kwargs``.
        """
        given = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        loaders = {
            f"{stage}_dataloader": _maker(datasets, batch_size, num_workers, shuffle=stage == "train")
            for stage, datasets in given.items()
            if datasets is not None
        }
        # A separate class, so that the check for overridden loaders works as for all data modules.
        own_class: type[Self] = type(cls.__name__, (cls,), loaders)
        accepted = _accepted(cls, {"batch_size": batch_size, "num_workers": num_workers, **kwargs})
        known = [*keywords_of(DataModule.from_datasets), *keywords_of(cls)]
        check_names(f"{cls.__name__}.from_datasets", {n: v for n, v in kwargs.items() if n not in accepted}, known)
        return own_class(**accepted)


def _accepted(cls: type, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the constructor of a class accepts."""
    parameters = inspect.signature(cls).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in arguments.items() if takes_all or name in parameters}


def _maker(datasets: Any, batch_size: int, num_workers: int, *, shuffle: bool) -> Callable[[DataModule], Any]:
    def make(dataset: Any) -> DataLoader[Any]:
        shuffled = shuffle and not isinstance(dataset, IterableDataset)
        return DataLoader(dataset, batch_size=batch_size, shuffle=shuffled, num_workers=num_workers)

    def loaders(module: DataModule) -> Any:
        if isinstance(datasets, Mapping):
            return {name: make(dataset) for name, dataset in datasets.items()}
        return [make(each) for each in datasets] if type(datasets) in (list, tuple) else make(datasets)

    return loaders
