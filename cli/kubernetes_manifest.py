"""``kubernetes_manifest``: the manifest of a job for Kubeflow Trainer, a TrainJob and the runtime that it refers to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..framework.core.errors import CheckpointError, ConfigurationError, Preempted
from ..framework.system.failure_records import INTERRUPTED
from .job import Job
from .yaml_text import yaml_text

_GROUP = "trainer.kubeflow.org"
# Kubeflow Trainer looks for these names.
_NODE = "node"
_IS_TRAINER = {f"{_GROUP}/trainjob-ancestor-step": "trainer"}
_FINAL = [CheckpointError.exit_code, ConfigurationError.exit_code, INTERRUPTED]
# From SIGTERM to SIGKILL: a preempted run finishes its step and saves.
_GRACE_SECONDS = 300


def kubernetes_manifest(job: Job) -> str:
    """Return the manifest: two documents of YAML."""
    return "---\n".join(yaml_text(document) for document in documents(job))


def documents(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the TrainingRuntime and the TrainJob of a job.

    A TrainJob cannot say what exit codes mean, so the manifest has a runtime of its own:

    - A pod that was preempted, or that its host has evicted, is replaced, and the launchers of all nodes meet again.
    - After an exit code that a restart would not change, the job fails.
    - After any other failure all pods are replaced, at most ``max_restarts`` times.
    """
    return _document("TrainingRuntime", job, _runtime(job)), _document("TrainJob", job, _train_job(job))


def _document(kind: str, job: Job, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": f"{_GROUP}/v1alpha1", "kind": kind, "metadata": {"name": job.name}, "spec": spec}


def _runtime(job: Job) -> dict[str, Any]:
    pod = {
        # Needed for podFailurePolicy.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [{"name": _NODE, "image": job.image}],
    }
    batch_job = {
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onExitCodes": _exit_codes([Preempted.exit_code])},
                {"action": "FailJob", "onExitCodes": _exit_codes(_FINAL)},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": pod},
    }
    final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    job_set = {
        "failurePolicy": {"maxRestarts": job.max_restarts, "rules": [final]},
        "replicatedJobs": [{"name": _NODE, "template": {"metadata": {"labels": _IS_TRAINER}, "spec": batch_job}}],
    }
    return {"mlPolicy": {"numNodes": job.nodes, "torch": {}}, "template": {"spec": job_set}}


def _train_job(job: Job) -> dict[str, Any]:
    several = ("--nodes", str(job.nodes), "--node-rank", "$(PET_NODE_RANK)", "--rdzv", _RDZV) if job.nodes > 1 else ()
    literal = replace(job, script=_literal(job.script), arguments=tuple(map(_literal, job.arguments)))
    command = literal.command(*several, python="python")
    trainer: dict[str, Any] = {
        "image": job.image,
        "command": command[:4],
        "args": command[4:],
        "numNodes": job.nodes,
        "numProcPerNode": job.devices,
    }
    if job.gpus:
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": str(job.gpus)}}
    runtime = {"apiGroup": _GROUP, "kind": "TrainingRuntime", "name": job.name}
    return {"runtimeRef": runtime, "trainer": trainer}


# Kubernetes replaces these variables, which Kubeflow Trainer sets for torchrun.
_RDZV = "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"


def _literal(text: str) -> str:
    """Return text in which Kubernetes replaces no variables."""
    return text.replace("$(", "$$(")


def _exit_codes(values: list[int]) -> dict[str, Any]:
    return {"containerName": _NODE, "operator": "In", "values": values}
