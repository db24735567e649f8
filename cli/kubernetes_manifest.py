"""``kubernetes_manifest``: the manifest of a job for Kubeflow Trainer, a TrainJob and the runtime that it refers to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..framework.core.errors import Preempted
from ..framework.core.plain_yaml import is_plain_yaml
from ..framework.launch.restart_policy import FINAL
from .job import LAUNCHER, Job

_API_GROUP = "trainer.kubeflow.org"
# The name of the container and the label by which Kubeflow Trainer finds the job that trains.
_NODE = "node"
_TRAINER_LABELS = {f"{_API_GROUP}/trainjob-ancestor-step": "trainer"}
# Kubernetes replaces these variables, which Kubeflow Trainer sets for torchrun.
_NODE_RANK, _RENDEZVOUS = "$(PET_NODE_RANK)", "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"
# Exit codes of a failure that a restart would not change. A pod that has finished needs no rule.
_FAILED_FOR_GOOD = sorted(FINAL - {0, Preempted.exit_code})
# From SIGTERM to SIGKILL: a preempted run finishes its step and saves.
_GRACE_SECONDS = 300


def kubernetes_manifest(job: Job) -> str:
    """Return the manifest: two documents of YAML."""
    return "---\n".join(yaml_text(document) for document in kubernetes_documents(job))


def kubernetes_documents(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the TrainingRuntime and the TrainJob of a job.

    A TrainJob cannot say what exit codes mean, so the manifest has a runtime of its own:

    - A pod that was preempted, or that its host has evicted, is replaced, and the launchers of all nodes meet again.
    - After an exit code that a restart would not change, the job fails.
    - After any other failure all pods are replaced, at most ``max_restarts`` times.
    """
    return _document("TrainingRuntime", job, _runtime(job)), _document("TrainJob", job, _train_job(job))


def _document(kind: str, job: Job, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": f"{_API_GROUP}/v1alpha1", "kind": kind, "metadata": {"name": job.name}, "spec": spec}


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
                {"action": "FailJob", "onExitCodes": _exit_codes(_FAILED_FOR_GOOD)},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": pod},
    }
    final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    job_set = {
        "failurePolicy": {"maxRestarts": job.max_restarts, "rules": [final]},
        "replicatedJobs": [{"name": _NODE, "template": {"metadata": {"labels": _TRAINER_LABELS}, "spec": batch_job}}],
    }
    return {"mlPolicy": {"numNodes": job.nodes, "torch": {}}, "template": {"spec": job_set}}


def _train_job(job: Job) -> dict[str, Any]:
    nodes = ["--nodes", str(job.nodes), "--node-rank", _NODE_RANK, "--rdzv", _RENDEZVOUS] if job.nodes > 1 else []
    trainer: dict[str, Any] = {
        "image": job.image,
        "command": ["python", *LAUNCHER],
        "args": [*job.options, *nodes, *map(_literal, job.program)],
        "numNodes": job.nodes,
        "numProcPerNode": job.devices,
    }
    if job.gpus:
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": str(job.gpus)}}
    runtime = {"apiGroup": _API_GROUP, "kind": "TrainingRuntime", "name": job.name}
    return {"runtimeRef": runtime, "trainer": trainer}


def _literal(text: str) -> str:
    """Return text in which Kubernetes replaces no variables."""
    return text.replace("$(", "$$(")


def _exit_codes(values: list[int]) -> dict[str, Any]:
    return {"containerName": _NODE, "operator": "In", "values": values}


# ---- YAML, without a library for it ---------------------------------------------------------------------------------


def yaml_text(value: dict[str, Any]) -> str:
    """Return a mapping as a document of YAML; its leaves are texts, integers, and empty mappings or lists."""
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, (dict, list)) and item:
                yield f"{_scalar(key)}:"
                yield from (f"  {line}" for line in _lines(item))
            else:
                yield f"{_scalar(key)}: {_scalar(item)}"
    else:
        for item in value:
            if isinstance(item, (dict, list)) and item:
                first, *rest = _lines(item)
                yield f"- {first}"
                yield from (f"  {line}" for line in rest)
            else:
                yield f"- {_scalar(item)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and is_plain_yaml(value):
        return value
    # JSON is YAML too.
    return json.dumps(value)
