"""The one entry that both APIs call: a request in, its answers out piece by piece."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from opentelemetry.trace import get_current_span
from tokenizers import Tokenizer

from gateway.errors import DeadlineError, InvalidRequestError, UnknownModelError, WorkerLostError
from gateway.generation.admission import STOPPING, Admission
from gateway.generation.form import Form, GrammarChecks
from gateway.generation.merge import merged
from gateway.generation.readiness import Readiness
from gateway.generation.request import AnswerUsage, Chunk, Prepared, Prompt, Request
from gateway.generation.text import AnswerText, Vocabulary
from gateway.generation.tokenization import LONG_LIST, Tokenization
from gateway.generation.totals import Totals
from gateway.generation.tracing import GenerationTrace
from gateway.loop.factory import LoopFactory
from gateway.loop.stats import Stats
from gateway.roster import BY_TASK
from gateway.routing.paces import Paces
from gateway.routing.rollout import Rollout
from gateway.routing.router import TaskRule
from gateway.sequence import GatewaySequence
from gateway.settings import PREPARED_AT_ONCE, GatewaySettings, LiveSettings
from gateway.traffic_recorder import TrafficRecorder
from gateway.workers.fleet import Fleet
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.drafters.past_answers import Scope
from outrider.pace.settings import PaceSettings

TOKEN_ID_FIELDS = ("logit_bias", "stop_token_ids", "allowed_token_ids", "bad_token_ids")
CONTEXT_TOKENS = 8  # last tokens of the prompt; they decide how the answer's first token is written
ERROR_S = 2.0  # for readers to take the error that ends their answer
DRAWN_SEED_BITS = 53  # such a seed survives JSON readers that keep numbers as doubles


class Generation:
    def __init__(
        self,
        settings: GatewaySettings,
        tokenizer: Tokenizer,
        fleet: Fleet,
        sampling_defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """sampling_defaults: by name, of settings of which a request says nothing."""
        self._started_with = settings
        self.settings = settings  # in force
        self.refused_live: str | None = None  # why the newest live settings are not; None: they are
        self.fleet = fleet
        self.sampling_defaults = sampling_defaults
        self.tokenizer = tokenizer
        self.tokenization = Tokenization(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.special_tokens = [token.content for token in added.values() if token.special]
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self._vocabulary = cache(partial(Vocabulary, tokenizer))  # key: special tokens that are shown
        self.paces = Paces(PaceSettings())
        self._rounds = LoopFactory(fleet, self.paces, settings)
        self.totals = Totals()
        self.admission = Admission(settings.max_requests, settings.max_waiting)
        self.readiness = Readiness(fleet, settings.drafts)
        self._cut = asyncio.Event()  # set when requests under way have had their time to end
        # The work before that: bodies to parse, texts to tokenize, grammars to compile.
        self.preparations = Admission(PREPARED_AT_ONCE, settings.max_waiting)
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._grammars = GrammarChecks(tokenizer, settings.grammar_compile_s)
        self.recorder: TrafficRecorder | None = None
        if settings.record is not None and settings.record.fraction:
            self.recorder = TrafficRecorder(settings.record, self.totals.gateway)

    def warm_up(self) -> None:
        """Starts what only some requests need, so that the first of them does not wait. Returns at once."""
        self._grammars.warm_up()

    def close(self) -> None:
        """Ends the process and the threads that were started here."""
        self._grammars.close()

    def use(self, live: LiveSettings) -> None:
        """Puts settings in force: the pace for requests under way too, drafters for later requests.

        Raises:
            ValueError: what was in force stays.
        """
        self.settings = self._started_with.changed(live)
        self._rounds.use(self.settings)
        self.paces.use(live.pace)

    @property
    def rollouts(self) -> Iterator[tuple[TaskRule, str, Rollout]]:
        """Roll-outs of each new draft, for each kind of sequences that there were."""
        return self._rounds.rollouts

    def deadline(self) -> float:
        """The deadline of a request that arrives now, in the event loop's time."""
        return asyncio.get_running_loop().time() + self.settings.request_deadline_s

    async def prepare(
        self, request: Request, caller: str | None = None, deadline: float | None = None
    ) -> Prepared:
        """Whatever can be refused is refused here, before anything reaches a worker.

        Args:
            caller: who asks, as ``Authentication.check`` says.
            deadline: of the request; None: it arrives now.

        Raises:
            InvalidRequestError: naming the field.
            WorkerLostError: there is no target.
            DeadlineError: the request's form was not compiled in time.
        """
        settings = self.settings
        deadline = self.deadline() if deadline is None else deadline
        if request.model not in (None, settings.model):
            raise UnknownModelError("model", f"{request.model!r} is not served, {settings.model!r} is")
        self._check_counts(len(request.prompts), request.n)
        if "" in request.stop:
            raise InvalidRequestError("stop", "a stop string must not be empty")
        if (drafter := request.speculation.drafter) is not None:
            self._check_drafter(drafter)
        sampling = self._with_defaults(request.sampling)
        for name in TOKEN_ID_FIELDS:
            self.check_ids(name, getattr(sampling, name) or ())
        self._check_bad_ids(sampling.bad_token_ids)
        prompts = [await self._checked(prompt, sampling.max_tokens) for prompt in request.prompts]
        grammar = None if request.form is None else await self._grammar(request.form, request, deadline)
        seed = secrets.randbits(DRAWN_SEED_BITS) if sampling.seed is None else sampling.seed
        rule = request.speculation.verification
        stops = sampling.stop_token_ids
        if not sampling.ignore_eos:
            stops = (*stops, *sorted(request.ends - {*stops}))
        sampling = sampling.model_copy(
            update={"seed": seed, "verification": rule, "grammar": grammar, "stop_token_ids": stops}
        )
        scope = Scope(caller, request.task)
        make = partial(_sequences, request, prompts, sampling, seed, scope)
        is_long = request.n * sum(map(len, prompts)) > LONG_LIST
        return Prepared(
            await asyncio.to_thread(make) if is_long else make(),
            request.n,
            request.stop,
            request.speculation.resolved(settings.usual_drafter, self.paces.settings),
            request.task,
            request.priority,
            request.continues_text,
            request.shown,
            deadline,
            get_current_span(),
        )

    def _with_defaults(self, sampling: Sampling) -> Sampling:
        """Returns the settings with those of the checkpoint that the request does not name."""
        defaults = self.sampling_defaults
        unnamed = {name: defaults[name] for name in defaults.keys() - sampling.model_fields_set}
        return sampling.model_copy(update=unnamed) if unnamed else sampling

    async def _grammar(self, form: Form, request: Request, deadline: float) -> str:
        """Raises DeadlineError, and InvalidRequestError: settings may end the answer before its form does."""
        sampling = request.sampling
        contradicted = {"ignore_eos": sampling.ignore_eos}
        if form.ends_itself:
            contradicted["stop"] = bool(request.stop)
            contradicted["stop_token_ids"] = bool(sampling.stop_token_ids)
            contradicted["min_tokens"] = sampling.min_tokens > 0
        if wrong := next((name for name, is_set in contradicted.items() if is_set), None):
            raise InvalidRequestError(
                wrong, f"cannot be combined with {form.field}: the answer ends where its form does"
            )
        return await self._grammars.grammar(form, deadline)

    async def chunks(self, prepared: Prepared) -> AsyncGenerator[Chunk, None]:
        """The answers, one chunk per Verdict; those of several choices come as they are ready.

        Raises:
            OverloadedError: the queue is full.
            DeadlineError: the answer was not finished in time.
            InvalidRequestError: no worker can serve such a sequence.
            WorkerLostError: the service is being stopped.
        """
        if self.readiness.is_leaving:
            raise WorkerLostError(STOPPING)
        sequences = prepared.sequences
        completion_tokens, unfinished, stats = 0, len(sequences), Stats()
        operation = "text_completion" if prepared.continues_text else "chat"
        with self.totals.timing(operation) as timing, GenerationTrace(prepared, self.settings.model) as trace:
            choices = [self._choice(prepared, choice, stats, trace) for choice in range(len(sequences))]
            choices.append(self._until_cut())
            async with (
                self.admission.place(prepared.deadline),
                aclosing(_until(prepared.deadline, choices)) as chunks,
            ):
                timing.has_turn()
                trace.admitted()
                async for chunk in chunks:
                    timing.add(len(chunk.tokens))
                    completion_tokens += len(chunk.tokens)
                    unfinished -= chunk.finish_reason is not None
                    trace.said(chunk)
                    if unfinished:
                        yield chunk
                        continue
                    usage = AnswerUsage(
                        prepared.prompt_tokens,
                        completion_tokens,
                        prepared.speculation,
                        stats,
                        len(sequences),
                    )
                    timing.end()
                    await self._close(trace, prepared, usage)
                    yield replace(chunk, usage=usage)
                    return

    async def _until_cut(self) -> AsyncGenerator[Chunk, None]:
        """Waits beside the answers. Raises WorkerLostError if the service is stopped before they end."""
        await self._cut.wait()
        for _ in ():
            yield _
        raise WorkerLostError(STOPPING)

    async def leave(self, within_s: float) -> int:
        """Refuses new requests, and returns how many were under way once those have ended.

        Those that have not ended after ``within_s`` seconds end with an error.
        """
        self.readiness.is_leaving = True
        count = self.admission.running + self.admission.waiting
        for seconds in (within_s, ERROR_S):
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.admission.idle()
            self._cut.set()
            self.admission.close()
        return count

    async def _close(self, trace: GenerationTrace, prepared: Prepared, usage: AnswerUsage) -> None:
        trace.finished(usage, [sequence.finish_reason or "" for sequence in prepared.sequences])
        if trace.is_recording and self.settings.trace_texts:
            decode = self.tokenization.decode
            trace.texts(
                [await decode(sequence.prompt) for sequence in prepared.sequences[:: prepared.n]],
                [await decode(sequence.generated) for sequence in prepared.sequences],
            )

    async def _choice(
        self, prepared: Prepared, choice: int, total: Stats, trace: GenerationTrace
    ) -> AsyncGenerator[Chunk, None]:
        """One answer; what speculation did for it is added to ``total`` before its last chunk."""
        sequence = prepared.sequences[choice]
        before = sequence.prompt[-CONTEXT_TOKENS:] if prepared.continues_text else ()
        least = sequence.sampling.min_tokens
        text = AnswerText(self._vocabulary(prepared.shown), prepared.stop, before, least)
        rounds = self._rounds.of(
            sequence,
            prepared.speculation,
            prepared.deadline,
            prepared.task,
            prepared.priority,
            trace.answer(choice, prepared.speculation),
        )
        with self.totals.counting(rounds, prepared.task, prepared.speculation):
            async with aclosing(rounds.steps()) as steps:
                async for step in steps:
                    ids = [token.id for token in step.tokens]
                    pieces = text.add(ids, ends=step.finish_reason is not None)
                    if text.stopped:
                        sequence.finish_reason = "stop"
                    if sequence.finish_reason is not None:
                        total.add(rounds.stats)
                        if self.recorder is not None:
                            self.recorder.offer(sequence)
                    tokens = step.tokens[: len(pieces)]
                    yield Chunk(
                        choice,
                        tokens,
                        tuple(pieces),
                        sequence.finish_reason,
                        round=step.round,
                        scores=step.scores,
                    )
                    if sequence.finish_reason is not None:
                        return

    async def _checked(self, prompt: Prompt, max_tokens: int) -> tuple[int, ...]:
        """Its token ids. Raises as ``prepare`` does."""
        if isinstance(prompt, str):
            prompt = await self.token_ids(prompt, add_special_tokens=True)
        self._check_lengths(len(prompt), max_tokens)
        self.check_ids("prompt", prompt)
        return prompt

    def _check_counts(self, prompts: int, n: int) -> None:
        most = self.settings.max_choices
        if not 1 <= n <= most:
            raise InvalidRequestError("n", f"{n} answers, 1 to {most} are accepted")
        if not 1 <= prompts * n <= most:
            raise InvalidRequestError(
                "prompt", f"{prompts} prompts with n={n}: 1 to {most} answers are accepted"
            )

    def _check_bad_ids(self, bad_token_ids: Collection[int]) -> None:
        if len({*bad_token_ids}) == self.vocab_size:
            raise InvalidRequestError(
                "bad_token_ids",
                f"all {self.vocab_size} token ids, at most {self.vocab_size - 1} are accepted",
            )

    def _check_drafter(self, name: str) -> None:
        if name == BY_TASK:
            return
        try:
            self.settings.roster.find(name)
        except ValueError as error:
            raise InvalidRequestError("speculation.drafter", str(error)) from error

    def plain_rate(self) -> float | None:
        """Tokens per second that plain decoding would give, by the costs; None until they are known."""
        streams = {link.worker.address: link.streams for link in self.fleet.links() if not link.worker.draft}
        return self.paces.plain_rate(streams)

    def max_length(self) -> int:
        """Tokens of context that every target has. Raises WorkerLostError if there is no target."""
        lengths = [worker.max_length for worker in self.fleet.workers("target")]
        if not lengths:
            raise WorkerLostError("no target worker is ready")
        return min(lengths)

    def room(self, prompt_tokens: int) -> int:
        """Tokens that an answer to such a prompt may have, at least 1. Raises WorkerLostError."""
        context = self.max_length()
        return max(1, min(self.settings.max_output_tokens or context, context - prompt_tokens))

    def _longest_prompt(self) -> int:
        """Raises WorkerLostError if there is no target."""
        context = self.max_length()
        return min(self.settings.max_prompt_tokens or context, context - 1)

    def _check_lengths(self, prompt_tokens: int, max_tokens: int) -> None:
        if prompt_tokens == 0:
            raise InvalidRequestError("prompt", "must hold at least one token")
        longest_prompt = self._longest_prompt()
        if prompt_tokens > longest_prompt:
            raise InvalidRequestError(
                "prompt", f"{prompt_tokens} tokens, at most {longest_prompt} are accepted"
            )
        longest_output = self.room(prompt_tokens)
        if max_tokens > longest_output:
            raise InvalidRequestError(
                "max_tokens",
                f"{max_tokens} after {prompt_tokens} tokens of prompt, at most {longest_output} are accepted",
            )

    async def token_ids(self, prompt: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Raises as ``check_text``."""
        self.check_text("prompt", prompt)
        return tuple((await self.tokenization.encode(prompt, add_special_tokens=add_special_tokens)).ids)

    async def chat_ids(self, pieces: tuple[str, ...]) -> tuple[int, ...]:
        """Returns the token ids of a chat, in which no mark crosses from piece to piece.

        Raises:
            InvalidRequestError: as ``token_ids``.
        """
        self.check_text("prompt", "".join(pieces))
        return tuple(await self.tokenization.encode_apart(pieces))

    def check_text(self, field: str, text: str) -> None:
        """Raises InvalidRequestError for text that is too long for a prompt, however it is tokenized."""
        least, longest = self.tokenization.least_tokens(text), self._longest_prompt()
        if least > longest:
            raise InvalidRequestError(field, f"{least} tokens or more, at most {longest} are accepted")

    def check_length(self, field: str, token_ids: Collection[int]) -> None:
        """Raises InvalidRequestError for more token ids than a context holds."""
        if len(token_ids) > (longest := self.max_length()):
            raise InvalidRequestError(field, f"{len(token_ids)} token ids, at most {longest} are accepted")

    def token_starts(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Where each token's own text begins in the text of all, in characters."""
        text = AnswerText(self._vocabulary(frozenset()), ())
        return tuple(piece.start for piece in text.add([*token_ids], ends=True))

    def check_ids(self, field: str, token_ids: Collection[int]) -> None:
        """Raises InvalidRequestError unless the tokenizer knows them all, and for more than there are."""
        if field in TOKEN_ID_FIELDS and len(token_ids) > self.vocab_size:
            raise InvalidRequestError(
                field, f"{len(token_ids)} token ids, at most {self.vocab_size} are accepted"
            )
        largest = max(token_ids, default=0)
        if largest >= self.vocab_size:
            raise InvalidRequestError(field, f"token id {largest} must be below {self.vocab_size}")


async def _until(
    deadline: float, choices: Iterable[AsyncGenerator[Chunk, None]]
) -> AsyncGenerator[Chunk, None]:
    """All of them. Raises DeadlineError where the reader is too slow."""
    try:
        async with aclosing(merged(choices, deadline)) as chunks:
            async for chunk in chunks:
                yield chunk
    except TimeoutError as error:
        raise DeadlineError("the answer was not read before the request's deadline") from error


def _sequences(
    request: Request, prompts: Iterable[tuple[int, ...]], sampling: Sampling, seed: int, scope: Scope
) -> tuple[GatewaySequence, ...]:
    """One per answer. Its noise depends on its own prompt alone, so others beside it change nothing."""
    return tuple(
        GatewaySequence(
            prompt,
            sampling,
            noise_key(seed, choice, prompt),
            scope=scope,
            is_scored=request.scores_prompts,
            generates=request.generates,
        )
        for prompt in prompts
        for choice in range(request.n)
    )
