"""Removes the attributes that DeepSpeed leaves on the modules and parameters that it handles.

Left in place they break copying, pickling, and training under another strategy. They are found by comparing the
attributes before and after the start of an engine. tests/strategies/test_deepspeed.py compares all attributes of a
module before and after a fit.
"""

from __future__ import annotations

from torch import nn

from ...framework.diagnostics.program_state import ENGINE_ATTRIBUTES

COUNTS = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")
"""Attributes of modules in which stage 3 counts the parts of a backward pass; the first forward pass sets them.

Private to DeepSpeed, which offers nothing to go through a graph twice.
"""
# What steps set on parameters; users may set attributes of their own.
_PREFIXES = ("ds_", "_ds_", "_hp_")
# The names that engines have added, in all fits of this process: an earlier one may have left them on a module.
_ON_MODULES = ENGINE_ATTRIBUTES
_ON_MODULES.update(COUNTS)
_ON_PARAMETERS: set[str] = set()


class OriginalAttributes:
    """The attributes of a module and its parameters before set-up; ``restore`` removes those that DeepSpeed adds."""

    def __init__(self, module: nn.Module) -> None:
        self.dtypes = {id(one): one.dtype for one in module.parameters()}
        self.requires_grad = {id(one): one.requires_grad for one in module.parameters()}
        self._of_modules = [(part, set(vars(part))) for part in module.modules()]
        self._of_parameters = [(one, set(vars(one))) for one in module.parameters()]

    def note_added(self) -> None:
        """Take the attributes that are new since the construction for DeepSpeed's."""
        _ON_MODULES.update(*(vars(part).keys() - names for part, names in self._of_modules))
        _ON_PARAMETERS.update(*(vars(one).keys() - names for one, names in self._of_parameters))

    def restore(self, module: nn.Module) -> None:
        """Remove DeepSpeed's attributes, and set ``requires_grad`` as it was."""
        ordinary = type(nn.Module()._parameters)
        for part in module.modules():
            if type(part._parameters).__module__.startswith("deepspeed."):
                # A dict that gathers a parameter, collectively, when it is looked up.
                # Not through nn.Module.__setattr__, which looks names up in the dict that is replaced.
                object.__setattr__(part, "_parameters", ordinary(part._parameters.items()))
            for name in _ON_MODULES & set(vars(part)):
                delattr(part, name)
        for parameter in module.parameters():
            for name in list(vars(parameter)):
                if name in _ON_PARAMETERS or name.startswith(_PREFIXES):
                    delattr(parameter, name)
            if id(parameter) in self.requires_grad:
                parameter.requires_grad_(self.requires_grad[id(parameter)])
