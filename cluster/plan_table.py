"""Tables of a deployment's memory plan."""

from collections.abc import Mapping, Sequence

from cluster.plan import GB, DeploymentPlan, Device, Part
from outrider.engine.planning.accelerators import ACCELERATORS
from outrider.pace.acceptance import least_rate
from outrider.pace.step import StepSize

CONTEXTS = (1024, 4096, 16384, 65536)
STEP_SEQUENCES = (1, 8, 64)
STEP_TOKENS = (1, 3, 5, 9)  # tokens of each sequence: its newest token, and the tokens of a Draft
STEP_CONTEXT = 2048  # tokens
ROWS = ("weights", "cache", "activations", "graphs", "runtime")


def plan_table(deployment: DeploymentPlan) -> str:
    """Returns bytes by use for each role, the load of the devices, and the sequences that caches hold."""
    parts = [part for device in deployment.devices for part in device.parts]
    lines = [_model(part) for part in parts]
    lines.append(deployment.target.promise)
    lines += ["", _row("GB on each device", [part.title for part in parts])]
    for use in ROWS:
        lines.append(_row(use, [f"{getattr(part.plan, use) / GB:.3f}" for part in parts]))
    lines.append(_row("together", [f"{part.plan.total / GB:.3f}" for part in parts]))
    lines += ["", *(_device(device) for device in deployment.devices), ""]
    longest = min(part.plan.context_length for part in parts)
    contexts = [*(c for c in CONTEXTS if c < longest), longest]
    lines.append(_row("tokens of context", [f"{context:,}" for context in contexts]))
    for part in parts:
        sequences = [f"{part.plan.sequences(context):,}" for context in contexts]
        lines.append(_row(f"sequences, {part.title}", sequences))
    return "\n".join(lines)


def draft_table(deployment: DeploymentPlan) -> str:
    """Returns bytes that other drafts would take, and would leave free on their device."""
    target = deployment.target.plan
    context = min(4096, target.context_length)
    lines = [_row("Another draft", ["weights", "of target's", "cache", "together", "left", "sequences"])]
    for name, device in deployment.other_drafts():
        plan = device.parts[-1].plan
        sizes = [f"{size / GB:.3f}" for size in (plan.cache, plan.total, device.left)]
        sequences = f"{plan.sequences(context):,}" if device.left >= 0 else "does not fit"
        share = f"{plan.weights / target.weights:.3f}"
        lines.append(_row(name, [f"{plan.weights / GB:.3f}", share, *sizes, sequences]))
    lines += [
        f"GB on each device; sequences of {context:,} tokens. A step reads the weights once, so their part",
        "of the target's is the step's, if both devices read as fast. 1B and 8B have the shapes of",
        "Llama 3 and the target's vocabulary.",
    ]
    return "\n".join(lines)


def step_table(deployment: DeploymentPlan, accelerators: Mapping[str, str | None]) -> str:
    """Returns the work of a step of each model, and its time on known accelerators.

    accelerators: name in ACCELERATORS by group of settings; None: not known.
    """
    parts = [part for device in deployment.devices for part in device.parts]
    costs = [(part, part.costs()) for part in parts]
    each = [cost for _, cost in costs]
    lines = [
        _row("A step, on each device", [part.title for part in parts]),
        _row("GB of weights read", [f"{cost.weights_read(1, 1) / GB:.3f}" for cost in each]),
        _row("GB for five tokens", [f"{cost.weights_read(1, 5) / GB:.3f}" for cost in each]),
        _row("MB of a 1,000 of context", [f"{cost.cache_bytes_per_token / 1e3:.1f}" for cost in each]),
        _row("Gflop of a token", [f"{cost.flops_per_token / 1e9:.1f}" for cost in each]),
        _row("kernels", [f"{cost.kernels:,}" for cost in each]),
        _row("all-reduces", [f"{cost.all_reduces:,}" for cost in each]),
    ]
    for part, cost in costs:
        if (name := accelerators[part.group]) is None:
            continue
        tokens = STEP_TOKENS if part.role == "target" else STEP_TOKENS[:1]
        titles = ["plain" if count == 1 else f"{count} tokens" for count in tokens]
        taken = {
            sequences: [
                cost.seconds(ACCELERATORS[name], _size(sequences, count), is_early=count == 1)
                for count in tokens
            ]
            for sequences in STEP_SEQUENCES
        }
        lines += ["", _row(f"ms, {part.title} on {name}", titles)]
        for sequences, seconds in taken.items():
            lines.append(_row(f"sequences: {sequences}", [f"{1e3 * second:.2f}" for second in seconds]))
        if part.role == "target":
            lines += ["", _row("acceptance that pays", titles)]
            lines += [_row(f"sequences: {count}", _least_rates(seconds)) for count, seconds in taken.items()]
    lines += [
        f"Sequences of {STEP_CONTEXT:,} tokens. By data sheets and what an H100 reached of its own, with the",
        "host's part: a step with a Draft waits for it, a plain step and a draft's step run beside it.",
        "From that acceptance rate on a Draft brings more than plain decoding, if drafting takes no time.",
    ]
    if any(cost.expert_bytes for cost in each):
        lines.append("A step of a mixture reads the experts of all its tokens, which choose independently.")
    return "\n".join(lines)


def _least_rates(seconds: Sequence[float]) -> list[str]:
    """Returns a cell for each of STEP_TOKENS. seconds: time of a step for each of STEP_TOKENS."""
    plain, *drafted = seconds
    pairs = zip(drafted, STEP_TOKENS[1:], strict=True)
    rates = [least_rate(second / plain, tokens - 1) for second, tokens in pairs]
    return ["", *("never" if rate is None else f"{rate:.2f}" for rate in rates)]


def _size(sequences: int, tokens: int) -> StepSize:
    """Returns the size of a step. tokens: tokens of each sequence."""
    return StepSize(sequences, sequences * tokens, context_tokens=sequences * STEP_CONTEXT)


def _model(part: Part) -> str:
    plan = part.plan
    type_name = str(plan.dtype).removeprefix("torch.")
    ranks = part.engine.tensor_parallel
    devices = f", over {ranks} devices" if ranks > 1 else ""
    return (
        f"{part.title:7} {plan.model}: {plan.parameters / 1e6:,.1f} M parameters, {type_name}{devices}, "
        f"{plan.context_length:,} tokens of context"
    )


def _device(device: Device) -> str:
    held = " and ".join(f"{part.per_device} x {part.title}" for part in device.parts)
    return f"A device with {device.memory / GB:.2f} GB has {held}: {device.left / GB:.2f} GB are left."


def _row(title: str, cells: Sequence[str]) -> str:
    return f"{title:24}" + "".join(f" {cell:>13}" for cell in cells)
