"""Numbers of the pace that no user sets, in one table. Torch-free.

Each was chosen, and none was found by a sweep. What they give together is measured by ``python -m bench
simulate``, against the best fixed depth, and pinned by ``tests/pace``. "1/e after n" means: an observation
weighs 1/e after n later observations.
"""

import math
from dataclasses import dataclass

from outrider.pace.settings import MAX_DEPTH


@dataclass(frozen=True)
class PaceTuning:
    """The unit comes first in each comment."""

    # Acceptance
    prior_rate: float = 0.7  # probability: a first guess is correct, if nothing is known
    prior_rounds: float = 8.0  # rounds: weight of what is assumed about a task's rate
    alike_tokens: float = 4.0  # tokens: least weight of a task's rates in those of its sequence
    most_alike_tokens: float = 16.0  # tokens: most weight of a task's rates in those of its sequence
    alike_pairs: float = 500.0  # pairs of tokens: with fewer of them the weight is near the least
    known_rounds: float = 12.0  # rounds: from then on a rate may count as known
    known_error: float = 0.15  # probability: largest standard error of a known rate
    task_memory: float = 200.0  # rounds: 1/e after these, for a task
    sequence_memory: float = 16.0  # rounds: 1/e after these, for a sequence

    # Regression
    fit_after: int = 16  # observations: before them there is no fit
    fit_every: int = 8  # observations: a fit takes longer than a step's other work
    size_regions: int = 16  # regions: one for each doubling of a step's size
    region_memory: float = 50.0  # observations: 1/e after these in a region of sizes
    changed_factor: float = 1.5  # factor: a time as far off may mean another machine
    changed_times: int = 4  # times in a row that this has to happen
    changed_weight: float = 0.1  # share: weight of what was observed before the change
    known_times: float = 8.0  # observations: with that many, half of an error is the machine's slowness
    slowness_memory: float = 8.0  # observations: 1/e after these, for the slowness of the machine
    slowness_error: float = math.log(2.0)  # logarithm: largest error of one observation
    damping: float = 0.02  # share: weight of the present fit in the next fit
    outlier_factor: float = 4.0  # factor: a time further off counts as just as far off

    # Costs
    hinges_up: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512)  # tokens: from there on a token costs more
    hinges_down: tuple[int, ...] = (16, 64, 192)  # tokens: from there on a token costs less, as on some CPUs
    step_reluctance: tuple[float, ...] = (1e-3, 0.1, 1.0, 1.0, 1.0, 1e-2)  # shares: damping; see StepCost
    experts_reluctance: tuple[float, ...] = (1.0, 0.1, 1e-3)  # shares: damping; see LearnedExperts
    most_experts: float = 0.95  # share: a step that reads more does not tell how much a further token reads
    round_reluctance: tuple[float, ...] = (1e-3, 1.0)  # shares: damping of the constant and of sequences
    most_tokens: int = 1 << 20  # tokens: a step has fewer
    recent_steps: int = 128  # steps: a number so far below the newest is of a worker that was started anew
    prior_hidden: float = 0.6  # share of draft time that draft-ahead hides, if not known
    prior_hidden_verdicts: float = 8.0  # verdicts: weight of that share
    hidden_memory: float = 50.0  # verdicts: 1/e after these, for the hidden share
    least_round_s: float = 2e-4  # seconds: what could be hidden counts as at least this
    least_overhead_s: float = 5e-5  # seconds: a round outside of draft and target counts as at least this
    most_workers: int = 64  # workers of one drafter that are remembered
    published_s: float = 10.0  # seconds: 1/e after these, for published plain decoding

    # Calibration
    calibration_memory: float = 32.0  # observations of each sequence: 1/e after these
    calibration_depth_memory: float = 128.0  # times: 1/e after these, for rounds of one depth
    calibration_trial_memory: float = 4.0  # times: 1/e after these, in trials, which are rare
    calibration_fading: float = 400.0  # steps without rounds: their calibration is 1/e
    calibration_doublings: int = 2  # doublings: of that time, after rounds that were soon given up
    calibration_limit: float = 2.0  # factor: a time further off counts as just as far off
    calibration_depths: tuple[int, ...] = (2, 4, 8, MAX_DEPTH)  # tokens: up to each, depths share it

    # Optimizer and policy
    smallest: float = 1e-9  # probability: smaller divisors count as this
    least_reach: float = 0.02  # probability: a token reached more rarely is not drafted
    priced_nodes: float = 4.0  # nodes: the price of a further node is the mean over that many
    compared: int = 65  # numbers of drafted tokens that are compared, for each depth
    slack: float = 4.0  # factor: a Draft that takes longer than expected by it is late
    plain_steps: int = 8  # steps from one decision to the next, if no sequence has Drafts

    # Exploration
    trial_depth: int = 2  # tokens: depth of a round that only shows what rounds cost
    trial_rounds: int = 3  # rounds: before the first round no Verdict could be foreseen
    trial_steps_per_token: int = 64  # steps before a trial, per token of plain decoding
    first_trial: int = 16  # steps to the first trial, or to one after a doubling of load
    rarer_trials: int = 4  # factor: by it the wait for the next trial is longer, up to the setting
    explored_share: float = 0.02  # share of the target's time that rounds in vain may cost
    most_budget_s: float = 0.05  # seconds: budget that is kept for later
    probe_depth: int = 4  # tokens: depth of a guess that the text judges
    probe_doublings: int = 2  # doublings: of the wait, after probes that changed nothing
    probers: int = 8  # sequences: twice as many probe half as often each
    most_probers: int = 64  # sequences: more probe no more rarely
    unknown_factor: int = 4  # times as often an unknown drafter guesses
    watch_again: int = 8  # sequences after which an unknown drafter guesses for another
    most_credit: float = 16.0  # sequences: watched in a row at most
    most_watched: int = 4096  # pairs of task and drafter: labels come from clients


TUNING = PaceTuning()
