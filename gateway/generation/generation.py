"""Entry point of both APIs: prepares requests and streams their answers."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from opentelemetry.trace import get_current_span
from tokenizers import Tokenizer

from gateway.auditor import Auditor
from gateway.errors import InvalidRequestError, WorkerLostError
from gateway.generation.adapters import ServedAdapters
from gateway.generation.admission import STOPPING, Admission
from gateway.generation.answer_store import AnswerStore, LocalAnswers, answers_entry
from gateway.generation.form import GrammarChecks
from gateway.generation.limits import Limits
from gateway.generation.merge import merged
from gateway.generation.predictions import predicted_tokens, predictions_of
from gateway.generation.prompts import Prompts
from gateway.generation.readiness import Readiness
from gateway.generation.request import AnswerUsage, Chunk, Prepared, Request
from gateway.generation.sampling_defaults import with_defaults
from gateway.generation.sequences import sequences_of
from gateway.generation.text import AnswerText
from gateway.generation.tokenization import LONG_LIST, Tokenization
from gateway.generation.totals import Totals
from gateway.generation.tracing import GenerationTrace
from gateway.generation.vocabulary import Vocabulary
from gateway.loop.factory import LoopFactory
from gateway.loop.parking import Parking
from gateway.loop.stats import Stats
from gateway.receipts import ReceiptSigner
from gateway.roster import BY_TASK
from gateway.routing.paces import Paces
from gateway.routing.rollout import Rollout
from gateway.routing.router import TaskRule
from gateway.settings import PREPARED_AT_ONCE, GatewaySettings, LiveSettings
from gateway.tenants.tenants import Tenants
from gateway.traffic_recorder import TrafficRecorder
from gateway.workers.adapter_store import AdapterStore
from gateway.workers.fleet import Fleet
from outrider.drafters.past_answers import Scope
from outrider.pace.settings import PaceSettings

CONTEXT_TOKENS = 8  # last tokens of the prompt; the text of the answer's first token depends on them
ERROR_S = 2.0  # seconds for readers to receive the error that ends their answer
DRAWN_SEED_BITS = 53  # bits of a random seed; JSON readers that keep numbers as doubles preserve it


class Generation:
    """Prepares the requests of this gateway, and generates their answers."""

    def __init__(
        self,
        settings: GatewaySettings,
        tokenizer: Tokenizer,
        fleet: Fleet,
        sampling_defaults: Mapping[str, Any] = MappingProxyType({}),
        adapter_store: AdapterStore | None = None,
    ) -> None:
        """
        Args:
            sampling_defaults: values by name for settings that a request does not name.
            adapter_store: adapters that requests have loaded; None: requests load none.
        """
        self._started_with = settings
        self.settings = settings  # settings in force, with live settings
        self.refused_live: str | None = None  # why the newest live settings are not in force; None: they are
        self.fleet = fleet
        self.sampling_defaults = sampling_defaults
        self.tokenizer = tokenizer
        self.tokenization = Tokenization(tokenizer)
        self.adapters = ServedAdapters(settings, fleet, adapter_store)
        self.answers: AnswerStore = LocalAnswers(settings.stored_answer_bytes)
        self.limits = Limits(settings, tokenizer, self.tokenization, fleet)
        self.prompts = Prompts(self.tokenization, self.limits)
        added = tokenizer.get_added_tokens_decoder()
        self.special_tokens = [token.content for token in added.values() if token.special]
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self._vocabulary = cache(partial(Vocabulary, tokenizer))  # key: special tokens that are shown
        self.paces = Paces(PaceSettings(), fleet.workers)
        self._loops = LoopFactory(fleet, self.paces, settings)
        self.totals = Totals()
        self.tenants = Tenants(settings)
        self.admission = Admission(settings.max_requests, settings.max_waiting)
        self.readiness = Readiness(fleet, settings.drafts)
        self._cut = asyncio.Event()  # set once running requests have had their time to end
        # Admission to the work before generation: parsing, tokenization, compilation of grammars.
        self.preparations = Admission(PREPARED_AT_ONCE, settings.max_waiting)
        self._grammars = GrammarChecks(tokenizer, settings.grammar_compile_s)
        self.recorder: TrafficRecorder | None = None
        if settings.record is not None and settings.record.fraction:
            self.recorder = TrafficRecorder(settings.record, self.totals.gateway)
        self.auditor: Auditor | None = None
        if settings.audit is not None and settings.audit.fraction:
            self.auditor = Auditor(settings.audit, fleet)
        self._signer = ReceiptSigner(settings.receipt_key, fleet)

    def warm_up(self) -> None:
        """Starts the grammar sandbox, so that the first request with a form need not wait. Does not block."""
        self._grammars.warm_up()

    def close(self) -> None:
        """Ends the processes, threads and audits that were started here."""
        self._grammars.close()
        if self.auditor is not None:
            self.auditor.close()

    def use(self, live: LiveSettings) -> None:
        """Applies live settings: the pace to running requests too, drafters to later requests.

        Raises:
            ValueError: the settings are invalid; the earlier settings stay in force.
        """
        self.settings = self._started_with.changed(live)
        self._loops.use(self.settings)
        self.paces.use(live.pace)

    @property
    def rollouts(self) -> Iterator[tuple[TaskRule, str, Rollout]]:
        """Roll-outs of all new drafts, each with its task and rule and the draft's name."""
        return self._loops.router.rollouts

    def deadline(self) -> float:
        """Returns the deadline of a request that arrives now, in the event loop's time."""
        return asyncio.get_running_loop().time() + self.settings.request_deadline_s

    async def prepare(
        self, request: Request, caller: str | None = None, deadline: float | None = None
    ) -> Prepared:
        """Checks a request and makes its sequences. A refused request reaches no worker.

        Args:
            caller: name of the caller, from ``Authentication.check``.
            deadline: in the event loop's time; None: the request arrives now.

        Raises:
            InvalidRequestError: the request is invalid; the error names the field.
            WorkerLostError: there is no target.
            DeadlineError: the request's form was not compiled in time.
        """
        settings = self.settings
        deadline = self.deadline() if deadline is None else deadline
        adapter = await self.adapters.find(request.model)
        self.limits.check_counts(len(request.prompts), request.n)
        if "" in request.stop:
            raise InvalidRequestError("stop", "a stop string must not be empty")
        if (drafter := request.speculation.drafter) is not None:
            self._check_drafter(drafter)
        issuer, rule = None, request.speculation.verification
        if request.receipt:
            issuer = self._signer.issuer(settings.model, adapter, request.stop, rule)
        sampling = with_defaults(request.sampling, self.sampling_defaults)
        self.limits.check_sampling(sampling)
        prompts = [
            await self.prompts.checked(prompt, sampling.max_tokens, request.truncate_prompt)
            for prompt in request.prompts
        ]
        predictions = await predictions_of(request, caller, self.answers, self.limits, self.tokenization)
        grammar = None
        if request.form is not None:
            request.form.check(request.sampling, request.stop)
            grammar = await self._grammars.grammar(request.form, deadline)
        seed = secrets.randbits(DRAWN_SEED_BITS) if sampling.seed is None else sampling.seed
        stops = sampling.stop_token_ids
        if not sampling.ignore_eos:
            stops = (*stops, *sorted(request.ends - {*stops}))
        sampling = sampling.model_copy(
            update={"seed": seed, "verification": rule, "grammar": grammar, "stop_token_ids": stops}
        )
        # Acceptance is counted by task and adapter, because it depends on both.
        task = "/".join(filter(None, (adapter.name, request.task))) or None
        scope = Scope(caller, task)
        make = partial(sequences_of, request, prompts, sampling, scope, adapter, predictions)
        prompt_tokens, answers = sum(map(len, prompts)), request.n * len(prompts)
        claim = self.tenants.of(caller).claim(
            request.priority,
            request.order,
            prompt_tokens,
            answers if request.generates else 0,
            sampling.max_tokens,
        )
        is_long = request.n * prompt_tokens > LONG_LIST
        return Prepared(
            await asyncio.to_thread(make) if is_long else make(),
            request.n,
            request.stop,
            request.speculation.resolved(
                BY_TASK if any(predictions) else settings.usual_drafter, self.paces.settings
            ),
            task,
            claim,
            request.continues_text,
            frozenset(self.special_tokens) if request.shows_special else request.shown,
            deadline,
            get_current_span(),
            adapter.name or settings.model,
            self.fleet.targets()[0].fingerprint,
            issuer,
            request.keeps_stop,
        )

    async def chunks(self, prepared: Prepared, store_as: str = "") -> AsyncGenerator[Chunk, None]:
        """Yields the answers, a chunk per commit. Chunks of several choices come as they are ready.

        store_as: id under which the answers are stored before the last chunk; empty: they are not stored.

        Raises:
            OverloadedError: the queue is full, or a limit of the caller's tenant is reached.
            DeadlineError: the answer was not finished in time.
            InvalidRequestError: no worker can serve such a sequence.
            WorkerLostError: the service is being stopped.
        """
        if self.readiness.is_leaving:
            raise WorkerLostError(STOPPING)
        sequences = prepared.sequences
        completion_tokens, unfinished, stats = 0, len(sequences), Stats()
        operation = "text_completion" if prepared.continues_text else "chat"
        claim, parking = prepared.claim, Parking()
        with (
            self.totals.timing(operation, prepared) as timing,
            GenerationTrace(prepared, prepared.model) as trace,
        ):
            choices = [
                self._choice(prepared, choice, stats, trace, parking) for choice in range(len(sequences))
            ]
            choices.append(self._until_cut())
            async with (
                claim.tenant.charged(claim),
                self.admission.permit(prepared.deadline, claim, parking) as permit,
                aclosing(merged(choices, prepared.deadline)) as chunks,
            ):
                timing.admitted(prepared)
                trace.admitted()
                async for chunk in chunks:
                    timing.add(len(chunk.tokens))
                    self.admission.count(permit, len(chunk.tokens))
                    completion_tokens += len(chunk.tokens)
                    unfinished -= chunk.finish_reason is not None
                    trace.sending(chunk)
                    if unfinished:
                        yield chunk
                        continue
                    usage = AnswerUsage(
                        prepared.prompt_tokens,
                        completion_tokens,
                        prepared.speculation,
                        stats,
                        len(sequences),
                        *predicted_tokens(sequences),
                        prepared.cached_tokens,
                    )
                    timing.end()
                    await self._close(trace, prepared, usage)
                    if store_as:
                        await self._store(prepared, store_as)
                    yield replace(chunk, usage=usage)
                    return

    async def _until_cut(self) -> AsyncGenerator[Chunk, None]:
        """Raises WorkerLostError if the service is stopped before the answers end; yields no chunk."""
        await self._cut.wait()
        for _ in ():
            yield _
        raise WorkerLostError(STOPPING)

    async def leave(self, within_s: float) -> int:
        """Refuses new requests, waits for the accepted requests, and returns how many there were.

        Requests that have not ended after ``within_s`` seconds end with an error.
        """
        self.readiness.is_leaving = True
        count = self.admission.under_way
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

    async def _store(self, prepared: Prepared, name: str) -> None:
        """Stores the answers, unless the caller has no name: such callers cannot be told apart."""
        if (caller := prepared.sequences[0].scope.caller) is not None:
            entry = answers_entry(sequence.generated for sequence in prepared.sequences)
            await self.answers.put(caller, name, entry)

    async def _choice(
        self, prepared: Prepared, choice: int, total: Stats, trace: GenerationTrace, parking: Parking
    ) -> AsyncGenerator[Chunk, None]:
        """Yields one answer. Its counters are added to ``total`` before its last chunk."""
        if prepared.speculation.mode != "off":
            await self.readiness.wait_for_drafts(prepared.deadline)
        sequence = prepared.sequences[choice]
        before = sequence.prompt[-CONTEXT_TOKENS:] if prepared.continues_text else ()
        least, told, receipt = sequence.sampling.min_tokens, 0, None
        vocabulary = self._vocabulary(prepared.shown)
        text = AnswerText(vocabulary, prepared.stop, before, least, keeps_stop=prepared.keeps_stop)
        while True:
            loop = self._loops.of(
                sequence,
                prepared.speculation,
                prepared.deadline,
                prepared.task,
                prepared.priority,
                trace.answer(choice, prepared.speculation),
                parking,
            )
            with self.totals.counting(loop, prepared.task, prepared.speculation):
                async with aclosing(loop.steps()) as steps:
                    async for step in steps:
                        ids = [token.id for token in step.tokens]
                        pieces = text.add(ids, ends=step.finish_reason is not None)
                        if text.stop is not None:
                            sequence.finish_reason = "stop"
                        if sequence.finish_reason is not None:
                            total.add(loop.stats)
                            if self.recorder is not None:
                                self.recorder.offer(sequence)
                            if self.auditor is not None:
                                self.auditor.offer(sequence)
                        tokens = step.tokens[: len(pieces)]
                        told += len(tokens)
                        if sequence.finish_reason is not None and prepared.issuer is not None:
                            receipt = prepared.issuer.receipt(sequence, told, choice % prepared.n)
                        yield Chunk(
                            choice,
                            tokens,
                            tuple(pieces),
                            sequence.finish_reason,
                            round=step.round,
                            scores=step.scores,
                            stop=text.stop,
                            receipt=receipt,
                        )
                        if sequence.finish_reason is not None:
                            return
            total.add(loop.stats)  # until it was parked; another loop continues
            await parking.resumed(prepared.deadline)

    def _check_drafter(self, name: str) -> None:
        if name == BY_TASK:
            return
        try:
            self.settings.roster.find(name)
        except ValueError as error:
            raise InvalidRequestError("speculation.drafter", str(error)) from error

    def plain_rate(self) -> float | None:
        """Returns the tokens per second that plain decoding would give now, by the costs; None: unknown."""
        streams = {link.worker.address: link.streams for link in self.fleet.links() if not link.worker.draft}
        return self.paces.plain_rate(streams)

    def token_starts(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Returns where the text of each token begins in the text of all tokens, in characters."""
        text = AnswerText(self._vocabulary(frozenset()), ())
        return tuple(piece.start for piece in text.add([*token_ids], ends=True))
