"""Constants of the pace that are not user settings, in one table. Torch-free.

All values were chosen by hand, not found by a sweep. ``python -m bench simulate`` compares their joint result
with the best fixed depth, and ``tests/pace`` pins it. The memory of an estimate is the number of later
observations after which an observation weighs 1/e.
"""

import math
from dataclasses import dataclass

from outrider.pace.settings import MAX_DEPTH


@dataclass(frozen=True)
class PaceTuning:
    """Constants of the pace. Each comment begins with the unit."""

    # Acceptance
    prior_rate: float = 0.7  # probability: prior rate at which a first guess is correct
    prior_rounds: float = 8.0  # rounds: weight of the prior of a task's rate
    least_credibility_tokens: float = 4.0  # tokens: least weight of a task's rates in a sequence's rates
    most_credibility_tokens: float = 16.0  # tokens: most weight of a task's rates in a sequence's rates
    credibility_pairs: float = 500.0  # pairs of tokens: with fewer pairs, that weight is near its minimum
    known_rounds: float = 12.0  # rounds: least number for a rate to count as known
    known_error: float = 0.15  # probability: largest standard error of a known rate
    task_memory: float = 200.0  # rounds: memory of a task's rates
    sequence_memory: float = 16.0  # rounds: memory of a sequence's rates

    # Regression
    fit_after: int = 16  # observations: number before the first fit
    fit_every: int = 8  # observations: number between fits; a fit takes longer than a step's other work
    size_regions: int = 16  # regions: one for each doubling of a step's size
    region_memory: float = 50.0  # observations: memory of a region of sizes
    changed_factor: float = 1.5  # factor: an error as large may show that the machine has changed
    changed_times: int = 4  # errors: consecutive number after which the machine counts as changed
    changed_weight: float = 0.1  # share: remaining weight of observations before the change
    known_times: float = 8.0  # observations: number in a region at which half of an error counts as slowness
    slowness_memory: float = 8.0  # observations: memory of the machine's slowness
    slowness_error: float = math.log(2.0)  # logarithm: largest error of one observation
    damping: float = 0.02  # share: weight of the present fit in the next fit
    outlier_factor: float = 4.0  # factor: larger errors of a time are clipped to it

    # Costs
    hinges_up: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512)  # tokens: bends from which tokens cost more
    hinges_down: tuple[int, ...] = (16, 64, 192)  # tokens: bends from which tokens cost less, as on some CPUs
    step_reluctance: tuple[float, ...] = (1e-3, 0.1, 1.0, 1.0, 1.0, 1e-2, 1e-2)  # shares: damping in StepCost
    experts_reluctance: tuple[float, ...] = (1.0, 0.1, 1e-3)  # shares: damping in LearnedExperts
    most_experts: float = 0.95  # share: a step that reads more is ignored; further tokens hardly read more
    round_reluctance: tuple[float, ...] = (1e-3, 1.0)  # shares: damping of the constant and of sequences
    most_tokens: int = 1 << 20  # tokens: upper bound of a step
    recent_steps: int = 128  # steps: a number so far below the newest is from a restarted worker
    prior_hidden: float = 0.6  # share: prior of the draft time that draft-ahead hides
    prior_hidden_verdicts: float = 8.0  # verdicts: weight of that prior
    hidden_memory: float = 50.0  # verdicts: memory of the hidden share
    least_round_s: float = 2e-4  # seconds: least value of the time that could be hidden
    least_overhead_s: float = 5e-5  # seconds: least value of a round's time outside of draft and target
    most_workers: int = 64  # workers: most that are remembered per drafter
    published_s: float = 10.0  # seconds: memory of the published cost of plain decoding

    # Calibration
    calibration_memory: float = 32.0  # observations of each sequence: memory
    calibration_depth_memory: float = 128.0  # observations of each sequence: memory for a class of depths
    calibration_trial_memory: float = 4.0  # observations of each sequence: memory in trials, which are rare
    calibration_fading: float = 400.0  # steps without rounds: decay of the calibration to 1/e
    calibration_doublings: int = 2  # doublings: most of that time, after rounds that were soon given up
    calibration_limit: float = 2.0  # factor: larger errors of a time are clipped to it
    calibration_depths: tuple[int, ...] = (2, 4, 8, MAX_DEPTH)  # tokens: upper ends of the classes of depths

    # Optimizer and policy
    smallest: float = 1e-9  # probability: lower bound of divisors
    least_reach: float = 0.02  # probability: a token that is accepted more rarely is not drafted
    priced_nodes: float = 4.0  # nodes: number over which the price of a further node is averaged
    compared: int = 65  # candidates: numbers of drafted tokens that are compared, for each depth
    slack: float = 4.0  # factor: multiple of the expected time after which a Draft is late
    plain_steps: int = 8  # steps: number between two decisions if no sequence has Drafts

    # Exploration
    trial_depth: int = 2  # tokens: depth of a trial round, which only shows what rounds cost
    trial_rounds: int = 3  # rounds: several, because draft-ahead cannot prepare for the first round
    trial_steps_per_token: int = 64  # steps: wait before a trial, per token of plain decoding in it
    first_trial: int = 16  # steps: wait before the first trial, or after the load has doubled
    rarer_trials: int = 4  # factor: growth of the wait for the next trial, up to the setting
    explored_share: float = 0.02  # share: part of the target's time that trial rounds may cost
    most_budget_s: float = 0.05  # seconds: most budget that is saved for later
    probe_depth: int = 4  # tokens: depth of a guess that the text judges
    probe_doublings: int = 2  # doublings: most of the wait, after probes that changed nothing
    probers: int = 8  # sequences: number that probe at the full rate; twice as many probe half as often each
    most_probers: int = 64  # sequences: a larger number does not make probes rarer
    unknown_factor: int = 4  # factor: how much more often an unknown drafter guesses
    watch_again: int = 8  # sequences: number after which an unknown drafter guesses again
    most_credit: float = 16.0  # sequences: most that are watched in a row
    most_watched: int = 4096  # pairs of task and drafter: most that are kept; clients choose the labels


TUNING = PaceTuning()
