"""Public names of Lightning's strategies that those of phalanx lack, with what to use instead."""

from __future__ import annotations

STRATEGY = {
    "all_gather": "call self.all_gather(value) of the module, or trainer.fabric.all_gather(value)",
    "barrier": "call trainer.fabric.barrier()",
    "batch_to_device": "call trainer.fabric.to_device(batch)",
    "broadcast": "call trainer.fabric.broadcast(value)",
    "global_rank": "read trainer.global_rank",
    "is_global_zero": "read trainer.is_global_zero",
    "lightning_module": "read trainer.lightning_module",
    "local_rank": "read trainer.local_rank",
    "model": "read trainer.model",
    "node_rank": "read trainer.node_rank",
    "num_processes": "read trainer.world_size",
    "optimizers": "read trainer.optimizers",
    "precision_plugin": "read the precision's name from trainer.precision",
    "reduce": "call trainer.fabric.all_reduce(value)",
    "reduce_boolean_decision": "call trainer.fabric.all_reduce(float(value), 'min') for all, or 'max' for any",
    "root_device": "read trainer.fabric.device",
    "world_size": "read trainer.world_size",
}
