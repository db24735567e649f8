"""Torch's ``DistributedDataParallel`` with a fixed order of reduction."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from ..framework.core.errors import ConfigurationError


class Replica(nn.parallel.DistributedDataParallel):
    """``DistributedDataParallel`` with a fixed order of reduction, and a readable error about unused parameters.

    Torch reduces the first backward pass in one bucket, and divides later ones by the order in which gradients arrived
    in the first. The sum of three or more ranks depends on that division, so the first step of a resumed run would be
    rounded differently than in an uninterrupted run. Here the buckets of all steps follow the reversed order of
    registration, which is the order of arrival if modules are registered in the order of their use.
    """

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        # Otherwise torch reverses the buckets itself.
        self._is_reversed = bool(arguments.get("static_graph") or not arguments.get("find_unused_parameters"))
        super().__init__(module, **arguments)
        # Of those that DDP waits for, whatever is frozen later.
        self._names = [n.removeprefix("module.module.") for n, one in self.named_parameters() if one.requires_grad]
        if not self._delay_all_reduce_all_params:
            # What torch itself does for a rank that has run out of data. No effect if the buckets are fixed already, as
            # with find_unused_parameters.
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Return the parameters in the order of reduction, and whether the gradient of each is sparse."""
        parameters, is_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if self._is_reversed:
            parameters.reverse()
            is_sparse.reverse()
        return parameters, is_sparse

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the step.

        Raises:
            ConfigurationError: parameters were unused in the previous step.
        """
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            raise ConfigurationError(
                f"strategy='ddp' waits for the gradient of every parameter, and {self._unused(str(error))} had no part "
                "in the loss: use strategy='ddp_find_unused_parameters_true', or freeze what is not trained."
            ) from None

    def _unused(self, message: str) -> str:
        """Return the names of the parameters whose indices are in torch's message."""
        match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        names = self._names
        order = range(len(names))[:: -1 if self._is_reversed else 1]
        found = [names[index] for index in sorted(order[int(number)] for number in match[1].split())] if match else []
        return ", ".join(found[:10]) + (f" and {len(found) - 10} more" if len(found) > 10 else "") or "some"
