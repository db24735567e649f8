"""Removes the attributes that DeepSpeed leaves on the modules and parameters that it handles.

Left in place they break copying, pickling, and training under another strategy. The names below are private to
DeepSpeed and were collected with 0.19.8. tests/strategies/test_deepspeed.py compares all attributes of a module before
and after a fit, so a name that a later version adds is noticed there.
"""

from __future__ import annotations

from torch import nn

from ...framework.diagnostics.program_state import ENGINE_ATTRIBUTES


class OriginalAttributes:
    """Dtypes and ``requires_grad`` of a module's parameters before set-up, and the removal of what DeepSpeed adds."""

    def __init__(self, module: nn.Module) -> None:
        self.dtypes = {id(one): one.dtype for one in module.parameters()}
        self.requires_grad = {id(one): one.requires_grad for one in module.parameters()}

    def restore(self, module: nn.Module) -> None:
        """Remove DeepSpeed's attributes, and set ``requires_grad`` as it was."""
        for part in module.modules():
            original = part.__dict__.get("_original_parameters")
            if original is not None:
                # DeepSpeed replaces the dict by one that gathers a parameter, collectively, when it is looked up.
                # Not through nn.Module.__setattr__, which looks names up in the dict that is replaced.
                object.__setattr__(part, "_parameters", type(original)(part._parameters.items()))
            for name in _ON_MODULES & set(vars(part)):
                delattr(part, name)
        for parameter in module.parameters():
            for name in list(parameter.__dict__):
                if name in _ON_PARAMETERS or name.startswith(_PREFIXES):
                    delattr(parameter, name)
            if id(parameter) in self.requires_grad:
                parameter.requires_grad_(self.requires_grad[id(parameter)])


# Named one by one, because users set attributes of their own on modules during a fit.
_ON_MODULES = {
    "_external_params", "ds_external_parameters", "all_parameters", "_original_parameters",
    "ds_inflight_param_registry", "ds_id", "ds_recompute_parameters", "ds_grads_remaining", "ds_model_granularity",
    "pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt", "_ds_child_entered", "__deepcopy__",
}  # fmt: skip
_PREFIXES = ("ds_", "_ds_", "_hp_", "_z3_")
_ON_PARAMETERS = {
    "load_hp_checkpoint_state", "param_idx_in_group", "_dp_group", "grad_accum", "get_full_hp_grad",
    "set_full_hp_grad", "get_full_hp_param", "set_full_hp_param", "_index_in_param_group", "_zero_optimizer",
    "reduce_gradients_at_owner", "partition_gradients", "all_gather", "all_gather_coalesced", "aligned_size", "item",
    "nvme_swapper", "partition_numel", "is_external_param", "padding_size", "convert_to_zero_parameters", "partition",
    "comm_dtype",
}  # fmt: skip
ENGINE_ATTRIBUTES.update(_ON_MODULES)
