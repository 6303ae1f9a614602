"""Runs the advice: the target answers, candidates guess along the answers, costs are added."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean, median

from cluster.settings import Settings
from outrider.drafters.registry import DrafterInfo, Place, drafter
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.errors import EngineError
from outrider.engine.loop.engine import Engine
from outrider.engine.planning.accelerators import Accelerator
from outrider.engine.planning.step_costs import StepCosts
from outrider.engine.settings import EngineSettings, Quantization
from outrider.pace.experts import NO_EXPERTS
from outrider.pace.tuning import TUNING
from workshop.advice.advice import Advice, Finding, Judgement
from workshop.advice.answers import Prompt, TargetAnswer, answered, by_task
from workshop.advice.candidates import DraftCandidate, checked, draft_name
from workshop.advice.experts import counted_experts
from workshop.advice.judged import Counts, JudgedAnswer, counted, counted_mixed
from workshop.advice.judging import judge_index, judge_starts, judge_suffix, judge_text
from workshop.advice.planned import Planned, planned
from workshop.advice.progress import HopelessError, Progress
from workshop.advice.settings import AdviceSettings
from workshop.advice.speed import ExpectedCosts, Prices, could_pay, expected
from workshop.advice.steps import DataSheetSteps, MeasuredSteps, StepTimes, measured_steps
from workshop.advice.target_drafter import TargetDrafterJudge
from workshop.memory import free_memory

logger = logging.getLogger(__name__)

PLAIN = DraftCandidate("plain decoding", drafter("ngram"))  # target without a drafter: n-grams take no memory
MARGIN = 10.0  # assumed speedup of a draft's measured steps; a draft that does not pay even then is refused
MEASURED_TOKENS = (1, 2, 3, 5, 9, 17)  # tokens per sequence in a step

AllJudged = dict[float, list[JudgedAnswer]]  # judged answers by temperature


@dataclass(frozen=True)
class Accelerators:
    """Accelerators whose data sheets give the costs of steps; None: steps are measured here."""

    target: Accelerator | None = None
    draft: Accelerator | None = None


@dataclass(frozen=True)
class ModelJudged:
    """Judged guesses of a model, and the times of its steps."""

    judged: AllJudged
    steps: StepTimes


class Adviser:
    """Judges all candidates for one deployment."""

    def __init__(
        self,
        settings: Settings,
        asked: AdviceSettings,
        memories: Mapping[str, int],
        accelerators: Accelerators = Accelerators(),
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args:
            settings: settings of the deployment, with the GPUs of each worker.
            memories: bytes of each device by group of settings (cluster/devices.py).
            tell: called with a line of progress.
        """
        self._settings = settings
        self._asked = asked
        self._memories = memories
        self._accelerators = accelerators
        self._progress = Progress(tell)
        self._prices = Prices(asked.price_per_hour, asked.draft_price_per_hour)
        self._answers: dict[float, list[TargetAnswer]] = {}  # answers by temperature
        self._measured: MeasuredSteps | None = None  # steps of the target
        self._experts = NO_EXPERTS  # experts that its steps read, counted if its step times are not measured
        self._models: dict[tuple[str, Quantization | None], ModelJudged] = {}
        self._hopeless: dict[tuple[str, Quantization | None], str] = {}  # reasons by model
        self._suffixes: AllJudged = {}

    def advise(self, prompts: Sequence[Prompt], candidates: Sequence[DraftCandidate]) -> Advice:
        """Judges the candidates on the target's answers to the prompts.

        Raises:
            EngineError: the target cannot be served.
            ValueError: no prompt leaves room for an answer.
        """
        self._have_answered(prompts)
        steps = self._target_steps(planned(PLAIN, self._settings, self._memories))
        plain = [streams / steps.seconds(streams, streams) for streams in self._asked.streams]
        advice = Advice(
            target=self._settings.target.model,
            streams=self._asked.streams,
            is_measured=self._accelerators.target is None,
            step_ms=1e3 * steps.seconds(1, 1),
            experts=self._experts,
            dollars=tuple(self._prices.per_million_tokens(rate, with_draft=False) for rate in plain),
        )
        for number, candidate in enumerate(candidates, start=1):
            self._progress.tell(f"{candidate.name} is judged, {number} of {len(candidates)}")
            try:
                advice.judgements.append(self._judgement(checked(candidate, self._settings.target.model)))
            except (EngineError, HopelessError) as error:
                advice.refused[candidate.name] = str(error)
                self._progress.tell(f"{candidate.name} is refused: {error}")
        return advice

    def _have_answered(self, prompts: Sequence[Prompt]) -> None:
        """Generates the target's answers, and measures its steps or counts the experts that they read."""
        asked = self._asked
        with self._loaded(PLAIN.target_engine(self._settings)) as target:
            for temperature in asked.temperatures:
                self._progress.tell(
                    f"the target answers {len(prompts)} prompts at temperature {temperature:g}"
                )
                answers = answered(target, prompts, temperature, asked.tokens, asked.seed)
                if not answers:
                    raise ValueError(f"no prompt leaves room for an answer in {target.max_length} tokens")
                self._answers[temperature] = answers
            if self._accelerators.target is None:
                self._progress.tell("steps of the target are measured")
                self._measured = self._steps_of(target, _up_to(MEASURED_TOKENS, asked.depth + 1))
            else:
                self._experts = counted_experts(target, self._answers[asked.temperatures[0]])

    def _steps_of(self, engine: Engine, sizes: Sequence[int]) -> MeasuredSteps:
        """Measures the steps of an engine. sizes: tokens per sequence."""
        # Each number of streams, and half of it.
        batches = sorted({*self._asked.streams, *(-(-count // 2) for count in self._asked.streams)})
        context = self._context()
        return measured_steps(engine, batches, sizes, context, self._asked.repetitions, self._progress)

    def _judgement(self, candidate: DraftCandidate) -> Judgement:
        plan = planned(candidate, self._settings, self._memories)
        counts, steps = self._counts(candidate, plan)
        costs = self._costs(candidate.info, plan, steps)
        logger.debug("%s costs %s", candidate.name, costs)
        findings = tuple(
            Finding(
                task,
                temperature,
                by_depth,
                tuple(expected(by_depth, costs, streams) for streams in self._asked.streams),
            )
            for (temperature, task), by_depth in counts.items()
        )
        return Judgement(
            name=candidate.name,
            drafter=candidate.info.name,
            place=candidate.info.place,
            costs=costs,
            target_cache=plan.target_cache,
            draft_memory=plan.draft,
            findings=findings,
            dollars=tuple(
                self._prices.per_million_tokens(
                    1.0 / fmean(1.0 / finding.expected[index].tokens_per_s for finding in findings),
                    with_draft=candidate.info.place is Place.DRAFT_WORKER,
                )
                for index in range(len(self._asked.streams))
            ),
        )

    def _costs(self, info: DrafterInfo, plan: Planned, steps: StepTimes | None) -> ExpectedCosts:
        is_ahead = info.place is Place.DRAFT_WORKER and self._draft_ahead
        return ExpectedCosts(
            target=self._target_steps(plan),
            drafter=info,
            draft=steps,
            round_s=1e-3 * self._asked.round_ms,
            hidden=TUNING.prior_hidden if is_ahead else 0.0,
        )

    def _counts(
        self, candidate: DraftCandidate, plan: Planned
    ) -> tuple[dict[tuple[float, str], dict[int, Counts]], StepTimes | None]:
        """Returns counts by temperature and task, then by depth; and the step times of the model, if any."""
        info, steps, index = candidate.info, None, None
        if info.place is Place.GATEWAY:
            judged = self._of_suffixes() if info.remembers else self._of_index(info)
        elif info.place is Place.TARGET_WORKER:
            judged, steps = self._of_target_drafter(candidate, plan)
        else:
            of_model = self._of_model(candidate, plan)
            judged, steps = of_model.judged, of_model.steps
            index = self._of_suffixes() if info.mixes else None
        counts = {}
        for temperature, answers in self._answers.items():
            for task, _ in by_task(answers):
                rows = [row for row, answer in enumerate(answers) if answer.task == task]
                mine = [judged[temperature][row] for row in rows]
                suffixes = None if index is None else [index[temperature][row] for row in rows]
                counts[temperature, task] = {
                    depth: counted(mine, depth) if suffixes is None else counted_mixed(mine, suffixes, depth)
                    for depth in range(1, self._asked.depth + 1)
                }
        return counts, steps

    def _of_index(self, info: DrafterInfo) -> AllJudged:
        return {
            temperature: judge_index(info.load(), answers, self._asked.depth)
            for temperature, answers in self._answers.items()
        }

    def _of_suffixes(self) -> AllJudged:
        past_tokens = self._settings.gateway.past_answer_tokens
        for temperature, answers in self._answers.items():
            if temperature not in self._suffixes:
                self._suffixes[temperature] = judge_suffix(answers, self._asked.depth, past_tokens)
        return self._suffixes

    def _of_target_drafter(self, candidate: DraftCandidate, plan: Planned) -> tuple[AllJudged, StepTimes]:
        judge = TargetDrafterJudge(candidate.target_engine(self._settings))
        self._progress.allow(self._asked.candidate_seconds)
        try:
            judged = {
                temperature: judge.judge(answers, self._asked.depth, self._progress)
                for temperature, answers in self._answers.items()
            }
            assert plan.draft_steps is not None
            if self._accelerators.target is None:
                return judged, judge.steps
            return judged, self._by_data_sheet(plan.draft_steps, self._accelerators.target)
        finally:
            del judge
            free_memory()

    def _of_model(self, candidate: DraftCandidate, plan: Planned) -> ModelJudged:
        """Judges a model once and keeps the result for its other candidates. Raises HopelessError."""
        assert candidate.model is not None
        key = candidate.model, candidate.quantization
        if key in self._hopeless:
            raise HopelessError(self._hopeless[key])
        if key not in self._models:
            with self._loaded(candidate.draft_engine(self._settings)) as engine:
                self._progress.allow(self._asked.candidate_seconds)
                try:
                    self._models[key] = self._guessing(engine, candidate.info, plan)
                except HopelessError as error:
                    self._hopeless[key] = str(error)
                    raise
        return self._models[key]

    def _guessing(self, engine: Engine, info: DrafterInfo, plan: Planned) -> ModelJudged:
        """Judges a loaded model and finds its step times. Raises HopelessError."""
        depth = self._asked.depth
        assert plan.draft_steps is not None
        steps: StepTimes
        if self._accelerators.draft is not None:
            steps = self._by_data_sheet(plan.draft_steps, self._accelerators.draft)
        else:
            measured = self._steps_of(engine, _up_to(MEASURED_TOKENS, depth) if info.is_parallel else (1,))
            self._check_it_could_pay(info, plan, measured)
            steps = measured
        judge = judge_starts if info.is_parallel else judge_text
        return ModelJudged(
            {
                temperature: judge(DraftModel(engine), answers, depth, self._progress)
                for temperature, answers in self._answers.items()
            },
            steps,
        )

    def _check_it_could_pay(self, info: DrafterInfo, plan: Planned, steps: MeasuredSteps) -> None:
        """Raises HopelessError if Drafts would not pay even with steps MARGIN times faster."""
        costs = self._costs(info, plan, steps.faster(MARGIN))
        if any(could_pay(costs, self._asked.depth, streams) for streams in self._asked.streams):
            return
        own, of_target = (1e3 * model.seconds(1, 1) for model in (steps, costs.target))
        raise HopelessError(
            f"a step takes {own:.1f} ms here, one of the target {of_target:.1f} ms: "
            f"it would not pay if it were {MARGIN:.0f} times faster and all its guesses correct"
        )

    def _target_steps(self, plan: Planned) -> StepTimes:
        if self._accelerators.target is not None:
            costs = plan.target_steps
            if self._experts != NO_EXPERTS:
                costs = replace(costs, experts=self._experts)
            return self._by_data_sheet(costs, self._accelerators.target)
        assert self._measured is not None
        return self._measured

    def _by_data_sheet(self, costs: StepCosts, accelerator: Accelerator) -> DataSheetSteps:
        return DataSheetSteps(costs, accelerator, len(self._context()))

    def _context(self) -> tuple[int, ...]:
        """Returns the beginning of an answered prompt, with the median length of all of them."""
        texts = [answer.text for answers in self._answers.values() for answer in answers]
        length = int(median(len(text) for text in texts))
        return next(text for text in texts if len(text) >= length)[:length]

    @property
    def _draft_ahead(self) -> bool:
        draft = self._settings.drafts.get(draft_name(self._settings))
        return draft is None or draft.draft_ahead != 0

    @contextmanager
    def _loaded(self, settings: EngineSettings) -> Iterator[Engine]:
        """Loads an engine and shuts it down afterwards, so that only one engine is in memory."""
        free_memory()
        engine = Engine.from_settings(settings)
        try:
            yield engine
        finally:
            engine.shut_down()


def _up_to(sizes: Sequence[int], most: int) -> list[int]:
    return sorted({most, *(size for size in sizes if size < most)})
