"""Piece of work under way: the tokens that it feeds in the next step, and its use of the logits."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import Draft, Verdict
from outrider.decoding.grammar import Mask
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.sampler import Choices
from outrider.engine.sequence import NO_DRAFT, EngineSequence
from outrider.engine.work import Result, Timings
from outrider.pace.step import Step, StepSize

NO_STEP = Step(0, StepSize(0, 0), 0.0)


@dataclass(frozen=True)
class StepPart:
    """A finished step, as each task that took part in it records it."""

    started: float  # seconds of the engine's clock
    forward: float  # seconds of its forward passes
    sample: float  # seconds of choosing tokens
    step: Step  # a pass of the step; the mean pass if the step drafted several positions
    passes: int = 1


class Task(ABC):
    """Work for one sequence, over one or more steps. ``done`` once it needs no further step."""

    ranks = 1  # number of best tokens that it wants after each of its nodes
    positions = 1  # tokens that a step may choose for it in succession, each fed before the next
    samples = False  # whether it samples tokens from the distributions of its rows
    yields = False  # whether it uses only the capacity that other work leaves
    chooses = True  # whether its rows of logits choose tokens; False: they rate committed tokens

    def __init__(self, sequence: EngineSequence, arrived: float) -> None:
        """arrived: time of the work by the engine's clock."""
        self.sequence = sequence
        self.done = False
        self.kept: tuple[int, ...] = ()  # nodes of the newest fed tree whose cache stays, root first
        self.steps: list[StepPart] = []  # steps since its last result
        self._since = arrived

    @abstractmethod
    def tree(self) -> Draft:
        """Returns the next step's drafted tokens after the committed tokens, pending tokens first."""

    @abstractmethod
    def nodes(self) -> Sequence[int]:
        """Returns the tree's nodes after which logits are wanted; ROOT: after the last committed token."""

    @abstractmethod
    def take(self, choices: Choices, cache: PagedCache) -> list[Result]:
        """Uses the logits of ``nodes``, in that order."""

    @property
    def judged(self) -> Draft:
        """Tree that coupled verification judges; ``nodes`` are then its root and all its nodes."""
        return NO_DRAFT

    def constrain(self) -> None:  # noqa: B027  most tasks draft nothing that a grammar could change
        """Adapts the fed tokens to the sequence's grammar. Called before a step if there is one."""

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens to feed: uncached committed tokens, and the tree."""
        return len(self.sequence.tokens) - self.sequence.cached + len(self.tree())

    def rows_of_part(self, count: int) -> int:
        """Returns the number of wanted rows of logits if a step feeds only ``count`` committed tokens."""
        return 0

    def give_up_draft(self) -> bool:
        """Drops the drafted tokens that it would feed; returns False if there are none."""
        return False

    def restart(self) -> None:
        """Handles the loss of the sequence's cache: drafted tokens are drafted again."""
        self.sequence.forget_pending()

    def rows(self) -> list[ChoiceContext]:
        """Returns the context of the choice of a token after each of ``nodes``."""
        sequence, tree, nodes = self.sequence, self.tree(), self.nodes()
        generated = sequence.tokens[sequence.prompt_length :]
        masks: list[Mask | None] = [None] * len(nodes)
        if sequence.matcher is not None:
            masks = sequence.matcher.masks(generated, tree, nodes)
        paths = [tuple(tree.tokens[n] for n in tree.path(node)) for node in nodes]
        return [sequence.row(generated, *of_node) for of_node in zip(paths, masks, strict=True)]

    def valid_part(self, choices: Choices) -> Draft:
        """Returns the tree, cut before the first node after which no token may be chosen."""
        if all(choices.are_valid):
            return self.tree()
        return self.tree().leading((*choices.are_valid, False).index(False) - 1)

    def until_end(self, verdict: Verdict) -> tuple[Verdict, str | None]:
        """Returns the Verdict up to the token that ends the generation, and the reason if there is an end.

        An end token is chosen if the caller's token lists exclude all tokens that the grammar allows. If the
        answer may not end there, the Verdict stops before that token, and the next step reports the error.
        """
        sequence, length = self.sequence, len(self.sequence.tokens)
        if length + len(verdict.tokens) < sequence.limit and sequence.end_token_ids.isdisjoint(
            verdict.tokens
        ):
            return verdict, None
        for index, token in enumerate(verdict.tokens):
            finish = sequence.finish_of(token, length + index + 1)
            if finish == "stop" and index and not sequence.ends_in_form(verdict.tokens[:index], token):
                return Verdict(verdict.accepted[: index - 1], verdict.tokens[:index]), None
            if finish is not None:
                return Verdict(verdict.accepted[:index], verdict.tokens[: index + 1]), finish
        return verdict, None

    def timings(self) -> Timings:
        """Returns timings since submission, or since the last result of this work."""
        now, since, steps = self.sequence.clock(), self._since, self.steps
        forward = sample = step = 0.0
        count = 0
        for part in steps:
            late = max(since - part.started, 0.0)  # overlap: a step may be launched before the last result
            forward += part.forward
            sample += part.sample
            step += part.step.seconds * part.passes - late
            count += part.passes
        timings = Timings(
            queue=max(steps[0].started - since, 0.0) if steps else now - since,
            forward=forward,
            sample=sample,
            step=step,
            total=now - since,
            last_step=steps[-1].step if steps else NO_STEP,
            steps=count,
            preemptions=self.sequence.preemptions,
            adopted=self.sequence.adopted,
        )
        self._since, self.steps = now, []
        self.sequence.preemptions = self.sequence.adopted = 0
        return timings
