"""Memory plan of a candidate: the bytes that it takes, and the bytes left to the target's KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.plan import DeploymentPlan
from cluster.settings import Settings
from outrider.drafters.registry import Place
from outrider.engine.drafters.early_exit import EarlyExit
from outrider.engine.drafters.exit_search import costs
from outrider.engine.drafters.target_drafter import target_drafter
from outrider.engine.planning.step_costs import StepCosts
from outrider.engine.settings import EngineSettings
from workshop.advice.candidates import DraftCandidate


@dataclass(frozen=True)
class Planned:
    """Planned bytes on the devices, and costs of the steps."""

    target_cache: int  # bytes left for the target's KV cache beside the drafter; 0: not even one block
    draft: int  # bytes of a draft worker; 0: there is none
    target_steps: StepCosts
    draft_steps: StepCosts | None  # None: the drafter has no model


def planned(candidate: DraftCandidate, settings: Settings, memories: Mapping[str, int]) -> Planned:
    """Plans the memory of a deployment that drafts with this candidate.

    Args:
        settings: settings of the deployment, with the GPUs of each worker.
        memories: bytes of each device by group of settings (cluster/devices.py).

    Raises:
        EngineError: the plan refuses the deployment.
    """
    deployment = DeploymentPlan(candidate.settings(settings), memories)
    target, room = deployment.target, memories["target"]
    taken, steps = 0, None
    if candidate.info.place is Place.DRAFT_WORKER:
        *others, draft = deployment.devices[-1].parts
        taken, steps = draft.plan.total, draft.costs()
        room -= draft.taken if others else 0
    elif candidate.info.place is Place.TARGET_WORKER:
        steps = _target_drafter_steps(candidate.target_engine(settings), target.costs())
    cache = target.largest_cache(min(room // target.per_device, target.allowed))
    return Planned(cache, taken, target.costs(), steps)


def _target_drafter_steps(engine: EngineSettings, target: StepCosts) -> StepCosts:
    """Returns step costs of a target drafter: its own weights without a cache, or its share of the target."""
    (name,) = engine.drafters
    drafter = target_drafter(engine, name)
    if isinstance(drafter, EarlyExit):
        (share,) = costs(engine, drafter.candidates).values()
        return replace(
            target,
            weight_bytes=round(share * target.weight_bytes),
            expert_bytes=round(share * target.expert_bytes),
            cache_bytes_per_token=share * target.cache_bytes_per_token,
            flops_per_token=share * target.flops_per_token,
            kernels=round(share * target.kernels),
            layers=round(share * target.layers),
            all_reduces=round(share * target.all_reduces),
        )
    per_token = 1.0 * drafter.weight_bytes  # FLOPs: a multiplication and an addition per weight of two bytes
    return StepCosts(drafter.weight_bytes, 0.0, per_token, 0.0, kernels=0)
