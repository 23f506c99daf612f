"""From a question to a durable answer: limits, tokens, engine, parsing, journal, in this order.

Invariants:
1. A call is in the journal before anybody learns that it is finished. Text and arguments may be shown while they are sampled; what a
   harness acts on, the end of a tool call and the end of the reply, comes after the commit.
2. A call goes on when its client goes away, so that a client that comes back with the same question finds the answer.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from contracts.failures import Limit
from contracts.sessions import CallRecord, CallTimings
from proxy.canonical import Answer, Message, Question, assistant, extends, identity
from proxy.constraints import before_stop, structured_outputs, until_stop
from proxy.engine import EnginePool
from proxy.errors import BadRequestError, EngineUnavailableError, LimitReachedError, ProxyError, ReplayDivergedError, UnauthorizedError
from proxy.graph import Call, Place
from proxy.journal import Journal
from proxy.metrics import (
    CALL_SECONDS,
    FIRST_TOKEN_SECONDS,
    IN_FLIGHT,
    REPLAYED,
    REPLAYS,
    SAMPLED,
    SEGMENTS,
)
from proxy.rendering import Parsed, Rendering
from proxy.replay import Match
from proxy.sampling import Job, Sample, Sampler
from proxy.sessions import Session, Sessions

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Pending:
    """A call in flight, or one that is answered again. Any number of clients may watch it."""

    identity: str
    created: int
    message: Message = field(default_factory=lambda: assistant("", "", ()))
    answer: Answer | None = None
    error: ProxyError | None = None
    task: "asyncio.Task[None] | None" = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def show(self, message: Message) -> bool:
        """Let the message grow; returns whether it did. One that does not extend what was shown is held back."""
        if message == self.message or not extends(message, self.message):
            return False
        self.message = message
        self.changed()
        return True

    def changed(self) -> None:
        """Wake whoever watches."""
        previous, self._changed = self._changed, asyncio.Event()
        previous.set()

    async def watch(self, keep_alive: float) -> AsyncIterator[None]:
        """One item for each change, and for each `keep_alive` seconds without one; ends when the call has."""
        while self.answer is None and self.error is None:
            changed = self._changed
            yield
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), keep_alive)

    async def result(self) -> Answer:
        """The answer. Raises ProxyError."""
        async for _ in self.watch(keep_alive=3600):
            pass
        if self.error:
            raise self.error
        assert self.answer
        return self.answer


@dataclass(frozen=True)
class Plan:
    """A call that may be made: its place, its prompt, how much it may sample before which limit cuts it, and in which form."""

    sequence: int
    place: Place
    prompt_ids: list[int]
    max_tokens: int
    cut: Limit | None
    form: dict[str, Any]
    arrived: float


Make = Callable[[Pending], Coroutine[Any, Any, Call]]  # makes a call durable, and shows in the pending one what can be shown before


class Generation:
    """Answers questions."""

    def __init__(
        self, sessions: Sessions, journal: Journal, rendering: Rendering, pools: dict[str, EnginePool], max_context: int | None
    ) -> None:
        self._sessions = sessions
        self._journal = journal
        self._rendering = rendering
        self._pools = pools
        self._max_context = max_context
        self._in_flight: dict[tuple[str, str], Pending] = {}

    async def ask(self, session: Session, question: Question) -> Pending:
        """Begin to answer `question`, join the call that does so already, or find the recorded answer.

        Raises BadRequestError, LimitReachedError, ReplayDivergedError or UnauthorizedError before anything is sampled.
        """
        if pending := self._in_flight.get((session.session_id, question.digest)):
            REPLAYS.labels("joined").inc()
            return pending
        if call := session.graph.asked_before(question):
            REPLAYS.labels("recorded").inc()
            call.record.replays += 1
            await self._journal.count_replay(session.session_id, call.record.sequence)
            answer = _answer(call)
            return Pending(answer.identity, answer.created, answer=answer)
        arrived = time.time()
        try:
            tokens_left = session.check_limits()
            if session.replay and (match := session.replayed(question, self._place(session, question))):
                sequence = _take_place(session, match.place)
                return self._begin(
                    session, question, sequence, arrived, lambda _: self._replay(session, question, match, sequence, arrived)
                )
            plan = self._plan(session, question, tokens_left, arrived)
        except LimitReachedError as error:
            await self._reached(session, error.limit)
            raise
        except ReplayDivergedError:
            await self._sessions.save(session)
            raise
        return self._begin(session, question, plan.sequence, arrived, lambda pending: self._live(session, question, plan, pending))

    def _begin(self, session: Session, question: Question, sequence: int, arrived: float, make: Make) -> Pending:
        """Let call `sequence` be made in the background. Whoever asks the same meanwhile finds it in flight."""
        pending = Pending(identity(session.session_id, sequence), int(arrived))
        self._in_flight[(session.session_id, question.digest)] = pending
        pending.task = asyncio.create_task(self._answer(session, question, pending, arrived, make))
        return pending

    def count(self, session: Session, question: Question) -> int:
        """Tokens that the prompt of `question` would have. Nothing is sampled or recorded. Raises BadRequestError."""
        return len(self._prompt(session, question)[1])

    async def cancel(self, session: Session) -> None:
        """End the session's calls in flight; none of them is recorded."""
        tasks = [pending.task for (owner, _), pending in self._in_flight.items() if owner == session.session_id and pending.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _plan(self, session: Session, question: Question, tokens_left: int, arrived: float) -> Plan:
        place, prompt_ids = self._prompt(session, question)
        bounds: list[tuple[int, Limit | None]] = [
            (session.opened.sampling.max_tokens, Limit.TOKENS),
            (tokens_left, Limit.TOKENS),
        ]
        if (context := self._context(session)) is not None:
            bounds.append((context - len(prompt_ids), Limit.CONTEXT))
        if question.max_tokens is not None:
            bounds.append((question.max_tokens, None))
        max_tokens, cut = min(bounds, key=lambda bound: bound[0])
        form = self._form(question, max_tokens)
        if max_tokens < 1:
            message = f"the prompt has {len(prompt_ids)} tokens, the context window of this model {context}"
            raise LimitReachedError(Limit.CONTEXT, message)
        return Plan(_take_place(session, place), place, prompt_ids, max_tokens, cut, form, arrived)

    def _place(self, session: Session, question: Question) -> Place:
        """Where `question` stands, by what was asked and answered so far."""
        if question.raw:
            return session.graph.place_raw(question, self._rendering.prompt(question.messages, []))
        return session.graph.place(question)

    def _prompt(self, session: Session, question: Question) -> tuple[Place, list[int]]:
        """Where `question` stands, and its tokens: those of the call that it extends, and what is new."""
        if question.raw:
            ids = self._rendering.prompt(question.messages, [])
            return session.graph.place_raw(question, ids), ids
        place = session.graph.place(question)
        if parent := place.parent:
            recorded = parent.record.response_ids
            prompt_ids = self._rendering.extend(parent.prompt_ids, recorded, place.new_messages, question.tools)
            if prompt_ids is not None:
                return place, prompt_ids
            place = session.graph.apart(question)
        return place, self._rendering.prompt(question.messages, question.tools)

    def _parse(self, question: Question, plan: Plan, ids: list[int], *, partial: bool) -> Parsed:
        """What the tokens say; of an answer that goes on, what can be shown."""
        if question.raw:
            parsed = Parsed(self._rendering.text(ids), "", [])
        else:
            parse = self._rendering.partial if partial else self._rendering.parse
            parsed = parse(plan.prompt_ids, ids, question.tools)
        return parsed

    def _form(self, question: Question, max_tokens: int) -> dict[str, Any]:
        """The sampling parameters that make the answer end where it has to and be as it must. Raises BadRequestError."""
        constraint = structured_outputs(question, self._rendering.call_form, max_tokens)
        # A grammar ends after one call by itself. The engine takes tokens that end an answer out of what a grammar may have.
        one_call = question.one_call and bool(question.tools) and not constraint
        form: dict[str, Any] = {"stop_token_ids": self._rendering.stop_token_ids(one_call=one_call)}
        if question.stop:
            form["stop"] = list(question.stop)
        if constraint:
            form["structured_outputs"] = constraint
        return form

    def _context(self, session: Session) -> int | None:
        """Tokens that prompt and answer may have together; none while no engine has said."""
        known = [bound for bound in (self._max_context, self._pool(session).max_context) if bound is not None]
        return min(known, default=None)

    def _pool(self, session: Session) -> EnginePool:
        return self._pools[session.opened.engine]

    async def _reached(self, session: Session, limit: Limit) -> None:
        if session.limit is None and not (limit is Limit.WALL_CLOCK and session.engine_failures):
            session.limit = limit
            await self._sessions.save(session)

    async def _answer(self, session: Session, question: Question, pending: Pending, arrived: float, make: Make) -> None:
        """The life of a call. Leaves an answer or an error in `pending`, whatever happens."""
        session.calls_in_flight += 1
        IN_FLIGHT.inc()
        try:
            pending.answer = _answer(await make(pending))
            session.answered = time.monotonic()
            CALL_SECONDS.observe(time.time() - arrived)
        except ProxyError as error:
            pending.error = error
            await self._count_failure(session, error)
        except asyncio.CancelledError:
            pending.error = UnauthorizedError()
            raise
        except Exception:
            log.exception("session %s: a call failed", session.session_id)
            pending.error = ProxyError("the proxy failed on this call")
        finally:
            session.calls_in_flight -= 1
            IN_FLIGHT.dec()
            del self._in_flight[(session.session_id, question.digest)]
            pending.changed()

    async def _live(self, session: Session, question: Question, plan: Plan, pending: Pending) -> Call:
        """Sample an answer and record the call."""
        if session.diverged_at == plan.sequence:
            await self._sessions.save(session)
        return await self._record(session, question, plan, await self._sample(session, question, plan, pending))

    async def _replay(self, session: Session, question: Question, match: Match, sequence: int, arrived: float) -> Call:
        """Record a call as it was recorded before, once its time has come."""
        try:
            await asyncio.sleep(session.pause(time.monotonic()))
            waited = time.time() - arrived
            timings = CallTimings(arrived=arrived, waited=waited, first_token=waited, total=waited)
            call = match.call(session.session_id, sequence, question, session.graph, timings)
            await self._keep(session, call)
        finally:
            if session.replay:
                session.replay.give_back(match)
        REPLAYED.labels(match.level.value).inc()
        return call

    async def _count_failure(self, session: Session, error: ProxyError) -> None:
        if isinstance(error, EngineUnavailableError):
            session.engine_failures += 1
            with suppress(ProxyError):
                await self._sessions.save(session)
        elif isinstance(error, LimitReachedError):
            with suppress(ProxyError):
                await self._reached(session, error.limit)

    async def _sample(self, session: Session, question: Question, plan: Plan, pending: Pending) -> Sample:
        def show(ids: list[int]) -> bool:
            if not question.stream:
                return False
            parsed = self._parse(question, plan, ids, partial=True)
            return pending.show(_message(session, plan, replace(parsed, content=before_stop(parsed.content, question.stop))))

        opened = session.opened
        params = {
            "temperature": opened.sampling.temperature,
            "top_p": opened.sampling.top_p,
            "top_k": opened.sampling.top_k,
            "logprobs": 0,
            **plan.form,
        }
        job = Job(
            session.session_id,
            f"{session.session_id}-{plan.sequence}",
            opened.policy,
            plan.prompt_ids,
            plan.max_tokens,
            params,
            opened.deadline,
        )
        return await Sampler(self._pool(session), job, show).run()

    async def _record(self, session: Session, question: Question, plan: Plan, sample: Sample) -> Call:
        """Parse the answer and make the call durable. Raises JournalUnavailableError, and then the call was never made."""
        parsed = self._parse(question, plan, sample.ids, partial=False)
        content, stop_sequence = until_stop(parsed.content, question.stop)
        parsed = replace(parsed, content=content)
        finish_reason: Literal["stop", "length", "tool_calls"] = "tool_calls" if parsed.calls else "stop"
        if sample.finish_reason == "length":
            finish_reason = "length"
        parent = plan.place.parent
        recorded = len(parent.prompt_ids) + len(parent.record.response_ids) if parent else 0
        segment, reason = session.graph.segment_for(plan.place)
        now = time.time()
        record = CallRecord(
            session_id=session.session_id,
            sequence=plan.sequence,
            parent=parent.record.sequence if parent else None,
            segment=segment,
            segment_reason=reason,
            kind=plan.place.kind,
            dialect=question.dialect,
            engine=sample.engine_url,
            messages=plan.place.new_messages,
            tools=[] if parent else question.tools,
            answer=_message(session, plan, parsed),
            prompt_ids=plan.prompt_ids[recorded:],
            response_ids=sample.ids,
            logprobs=sample.logprobs,
            versions=sample.versions,
            finish_reason=finish_reason,
            stop_sequence=stop_sequence,
            timings=CallTimings(
                arrived=plan.arrived,
                waited=(sample.taken or now) - plan.arrived,
                first_token=(sample.first_token or now) - plan.arrived,
                total=now - plan.arrived,
            ),
        )
        cut = plan.cut if finish_reason == "length" else None
        call = Call(record, question.digest, question.terms, question.window, cut, parent)
        await self._keep(session, call)
        SAMPLED.labels(session.opened.engine).inc(len(sample.ids))
        FIRST_TOKEN_SECONDS.observe(record.timings.first_token)
        return call

    async def _keep(self, session: Session, call: Call) -> None:
        """Make a call durable. Raises JournalUnavailableError, and then the call was never made."""
        begins_segment = call.record.segment not in session.graph.segments
        session.graph.add(call)
        try:
            await self._journal.add_call(call)
        except BaseException:
            session.graph = session.graph.without(call)
            raise
        if begins_segment:
            SEGMENTS.labels(call.record.segment_reason.value).inc()


def _take_place(session: Session, place: Place) -> int:
    """Number a call that will be made at `place`; what it extends is gone on from."""
    if place.parent:
        place.parent.extended = True
    sequence, session.next_sequence = session.next_sequence, session.next_sequence + 1
    return sequence


def check_engine(pools: dict[str, EnginePool], name: str) -> None:
    """Raises BadRequestError, listing the pools, unless there is one called `name`."""
    if name not in pools:
        raise BadRequestError(f"there is no engine pool {name!r}; there are: {', '.join(sorted(pools))}")


def _message(session: Session, plan: Plan, parsed: Parsed) -> Message:
    """Ids of calls have letters and digits only: some harnesses strip everything else (docs/proxy.md)."""
    calls = [("call" + identity(session.session_id, plan.sequence, index), *call) for index, call in enumerate(parsed.calls)]
    return assistant(parsed.content, parsed.reasoning, calls)


def _answer(call: Call) -> Answer:
    record = call.record
    return Answer(
        session_id=record.session_id,
        sequence=record.sequence,
        message=record.answer,
        finish_reason=record.finish_reason,
        prompt_tokens=len(call.prompt_ids),
        response_tokens=len(record.response_ids),
        created=int(record.timings.arrived),
        stop_sequence=record.stop_sequence,
    )
