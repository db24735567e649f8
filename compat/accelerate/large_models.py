"""Accelerate's functions for models that do not fit on a device: Accelerate's own, which must be installed.

A module that they place or offload is evaluated where it is, under ``single`` and ``ddp``.
"""

from __future__ import annotations

from ...framework.core.errors import ConfigurationError

try:
    from accelerate import (
        cpu_offload as cpu_offload,
        cpu_offload_with_hook as cpu_offload_with_hook,
        disk_offload as disk_offload,
        dispatch_model as dispatch_model,
        infer_auto_device_map as infer_auto_device_map,
        init_empty_weights as init_empty_weights,
        init_on_device as init_on_device,
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
        load_checkpoint_in_model as load_checkpoint_in_model,
    )
    from accelerate.utils import (
        compute_module_sizes as compute_module_sizes,
        get_balanced_memory as get_balanced_memory,
        get_max_memory as get_max_memory,
        offload_state_dict as offload_state_dict,
    )
except ModuleNotFoundError as error:
    raise ConfigurationError(
        f"Loading and offloading of large models needs {error.name}: pip install 'accelerate>=1.15'."
    ) from None
