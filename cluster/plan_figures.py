"""Figures of a deployment's memory plan, in machine-readable form."""

from typing import Any

from cluster.plan import DeploymentPlan, Device, Part
from cluster.plan_table import CONTEXTS, ROWS


def plan_figures(deployment: DeploymentPlan) -> dict[str, Any]:
    """Returns the devices and the needs of each part, in bytes, tokens and operations."""
    return {"promise": deployment.target.promise, "devices": [_device(each) for each in deployment.devices]}


def _device(device: Device) -> dict[str, Any]:
    return {
        "memory_bytes": device.memory,
        "left_bytes": device.left,
        "parts": [_part(part) for part in device.parts],
    }


def _part(part: Part) -> dict[str, Any]:
    plan, costs = part.plan, part.costs()
    contexts = [*(context for context in CONTEXTS if context < plan.context_length), plan.context_length]
    return {
        "role": part.role,
        "settings": part.group,
        "model": plan.model,
        "parameters": plan.parameters,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "context_length": plan.context_length,
        "tensor_parallel": part.engine.tensor_parallel,
        "per_device": part.per_device,
        "bytes": {use: getattr(plan, use) for use in (*ROWS, "total")},
        "sequences_by_context": {str(context): plan.sequences(context) for context in contexts},
        "step": {
            "weight_bytes_read": costs.weights_read(1, 1),
            "weight_bytes_read_by_five_tokens": costs.weights_read(1, 5),
            "cache_bytes_per_token": costs.cache_bytes_per_token,
            "flops_per_token": costs.flops_per_token,
            "kernels": costs.kernels,
            "all_reduces": costs.all_reduces,
        },
    }
