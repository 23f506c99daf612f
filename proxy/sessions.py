"""Sessions: who may ask, how much is left, what was asked.

Keys are not stored. A key is `of-SESSION-MAC`, where MAC is an HMAC of the session's id under the admin token; it is checked by
making it again, in constant time. Whoever lacks the token cannot make one, and a key opens its own session alone.
"""

import hashlib
import hmac
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pydantic import SecretStr

from contracts.failures import Limit
from contracts.sessions import CallRecord, OpenSession, ReplayLevel, ReplayStatus, SessionStatus
from proxy.canonical import Question
from proxy.errors import BadRequestError, LimitReachedError, ReplayDivergedError, UnauthorizedError
from proxy.graph import Graph, Place
from proxy.journal import Journal, StoredSession
from proxy.metrics import DIVERGED, SESSIONS
from proxy.replay import Match, Replay
from proxy.volatile import rules_of


class SessionConflictError(Exception):
    """A session with this identity is there already, on other terms; or the one that it is to replay has other terms."""


@dataclass(eq=False)
class Session:
    """One attempt of a rollout, as the proxy knows it."""

    session_id: str
    opened: OpenSession
    closed: bool = False
    limit: Limit | None = None
    engine_failures: int = 0
    graph: Graph = field(default_factory=Graph)
    next_sequence: int = 0
    calls_in_flight: int = 0
    replay: Replay | None = None
    diverged_at: int | None = None
    divergence: str = ""
    answered: float | None = None  # time.monotonic() of the latest answer

    @classmethod
    def of(cls, stored: StoredSession) -> "Session":
        """The session as it stood in the journal."""
        session = cls(
            stored.session_id,
            stored.opened,
            stored.closed,
            stored.limit_reached,
            stored.engine_failures,
            stored.graph,
            next_sequence=max(stored.graph.calls, default=-1) + 1,
            diverged_at=stored.diverged_at,
            divergence=stored.divergence,
        )
        session.answered = time.monotonic() if stored.graph.calls else None
        return session

    @property
    def records(self) -> list[CallRecord]:
        """Every finished call, in order of arrival."""
        return [call.full for _, call in sorted(self.graph.calls.items())]

    @property
    def response_tokens(self) -> int:
        """Sampled tokens, over all finished calls."""
        return sum(len(call.record.response_ids) for call in self.graph.calls.values())

    @property
    def status(self) -> SessionStatus:
        """What the session API says. An answer that was cut by a limit is the limit reached, unless the harness went on."""
        calls = self.graph.calls
        last = calls[max(calls)] if calls else None
        return SessionStatus(
            session_id=self.session_id,
            rollout=self.opened.rollout,
            attempt=self.opened.attempt,
            state="closed" if self.closed else "open",
            calls=len(calls),
            prompt_tokens=sum(len(call.prompt_ids) for call in calls.values()),
            response_tokens=self.response_tokens,
            segments=len({call.record.segment for call in calls.values()}),
            limit_reached=self.limit or (last.cut if last else None),
            engine_failures=self.engine_failures,
            replay=self._replay_status if self.opened.replay_of else None,
        )

    @property
    def _replay_status(self) -> ReplayStatus:
        levels = Counter(call.record.replayed.level for call in self.graph.calls.values() if call.record.replayed)
        hits = {level: levels[level] for level in ReplayLevel}
        return ReplayStatus(hits=hits, diverged_at=self.diverged_at, reason=self.divergence, refused=self._refuses)

    @property
    def _refuses(self) -> bool:
        """Whether the session has left the record and may only follow it."""
        return self.diverged_at is not None and self.opened.replay.on_divergence == "refuse"

    def replayed(self, question: Question, place: Place) -> Match | None:
        """The recorded call that answers `question` at `place`, taken; none if it is to be sampled. Raises ReplayDivergedError."""
        self._check_divergence()
        found = self.replay.find(self.graph, question, place) if self.replay else None
        if isinstance(found, Match):
            return found
        if found and self.diverged_at is None:
            self.diverged_at, self.divergence = self.next_sequence, found.reason
            DIVERGED.inc()
            self._check_divergence()
        return None

    def _check_divergence(self) -> None:
        if self._refuses:
            raise ReplayDivergedError(f"this session only follows a record, and the harness asks otherwise: {self.divergence}")

    def pause(self, now: float) -> float:
        """Seconds from `now` (monotonic) until a replayed answer may be given."""
        return 0.0 if self.answered is None else max(0.0, self.answered + self.opened.replay.pace - now)

    def check_limits(self) -> int:
        """Sampled tokens that are left. Raises LimitReachedError if another call is one too many."""
        limits = self.opened.limits
        if time.time() >= self.opened.deadline:
            raise LimitReachedError(Limit.WALL_CLOCK, "the session's deadline has passed")
        if len(self.graph.calls) + self.calls_in_flight >= limits.calls:
            raise LimitReachedError(Limit.CALLS, f"the session has used its {limits.calls} calls")
        left = limits.tokens - self.response_tokens
        if left <= 0:
            raise LimitReachedError(Limit.TOKENS, f"the session has sampled its {limits.tokens} tokens")
        return left


class Sessions:
    """All sessions. Open ones are in memory; a closed one is read from the journal when it is asked for."""

    def __init__(self, journal: Journal, admin_token: SecretStr) -> None:
        self._journal = journal
        self._secret = admin_token.get_secret_value().encode()
        self._open: dict[str, Session] = {}

    async def recover(self) -> int:
        """Take up the open sessions of the journal; returns their number."""
        self._open = {stored.session_id: Session.of(stored) for stored in await self._journal.open_sessions()}
        for session in self._open.values():
            session.replay = await self._record_for(session.opened)
        SESSIONS.set(len(self._open))
        return len(self._open)

    async def open(self, request: OpenSession, seal: Callable[[Session], Awaitable[None]]) -> Session:
        """Open the session of (rollout, attempt), or find it. The one that it replays is sealed by `seal`, if it is open.

        A repeat may move the deadline back, because the caller may have had to wait; every other difference is a
        SessionConflictError. So is a session to replay that was sampled on other terms; BadRequestError if it is none of this rollout's
        earlier ones.
        """
        session_id = _session_id(request)
        session = await self.get(session_id)
        if session is None:
            if request.replay_of is not None:
                source = await self.get(request.replay_of)
                check_replay(request, source)
                if source and not source.closed:
                    await seal(source)
            fresh = Session(session_id, request, replay=await self._record_for(request))
            session = self._open.setdefault(session_id, fresh)
        later = session.opened.model_copy(update={"deadline": max(session.opened.deadline, request.deadline)})
        if later.model_copy(update={"deadline": request.deadline}) != request:
            raise SessionConflictError(f"session {session_id} of {request.rollout} is open on other terms")
        if not session.closed:
            session.opened = later
            await self._journal.open_session(session_id, later)
            SESSIONS.set(len(self._open))
        return session

    async def _record_for(self, request: OpenSession) -> Replay | None:
        """What a session replays: always as it is in the journal, where a call that was being written when it was sealed may be."""
        if request.replay_of is None or (stored := await self._journal.load(request.replay_of)) is None:
            return None
        return Replay(stored.session_id, stored.graph, rules_of(request.labels.get("harness", "")))

    async def get(self, session_id: str) -> Session | None:
        """A session, open or closed."""
        if session := self._open.get(session_id):
            return session
        stored = await self._journal.load(session_id)
        return Session.of(stored) if stored else None

    async def close(self, session: Session) -> None:
        """Seal a session: later calls are refused."""
        session.closed = True
        await self.save(session)
        self._open.pop(session.session_id, None)
        SESSIONS.set(len(self._open))

    async def tidy(self, before: float) -> int:
        """Close what nobody has closed although its deadline passed before a time (Unix seconds), and forget what was closed before it."""
        for session in [session for session in self._open.values() if session.opened.deadline < before]:
            await self.close(session)
        return await self._journal.forget(before)

    async def save(self, session: Session) -> None:
        """Make the session's own counters durable."""
        await self._journal.update_session(
            session.session_id,
            closed=session.closed,
            limit=session.limit,
            engine_failures=session.engine_failures,
            diverged_at=session.diverged_at,
            divergence=session.divergence,
        )

    def key(self, session_id: str) -> SecretStr:
        """The session's credential."""
        mac = hmac.new(self._secret, f"session:{session_id}".encode(), hashlib.sha256).hexdigest()[:40]
        return SecretStr(f"of-{session_id}-{mac}")

    def authenticate(self, key: str) -> Session:
        """The open session that `key` belongs to. Raises UnauthorizedError."""
        session_id = key.removeprefix("of-").rpartition("-")[0]
        expected = self.key(session_id).get_secret_value()
        session = self._open.get(session_id)
        if not hmac.compare_digest(expected.encode(), key.encode()) or session is None or session.closed:
            raise UnauthorizedError
        return session

    def is_admin(self, token: str) -> bool:
        """Whether `token` is the admin token."""
        return hmac.compare_digest(token.encode(), self._secret)


def check_replay(request: OpenSession, source: Session | None) -> None:
    """Raises BadRequestError or SessionConflictError unless the session that `request` opens may replay `source`."""
    named = f"the session to replay, {request.replay_of!r},"
    if source is None:
        raise BadRequestError(f"{named} does not exist")
    earlier = source.opened
    if earlier.rollout != request.rollout:
        raise BadRequestError(f"{named} is of another rollout, {earlier.rollout}")
    if earlier.attempt >= request.attempt:
        raise BadRequestError(f"{named} is of attempt {earlier.attempt}, which is not before attempt {request.attempt}")
    for term in ("engine", "policy", "sampling"):
        if getattr(earlier, term) != getattr(request, term):
            raise SessionConflictError(f"{named} was opened with another {term}: {getattr(earlier, term)}")
    if earlier.labels.get("harness") != request.labels.get("harness"):
        raise SessionConflictError(f"{named} was opened for another harness: {earlier.labels.get('harness')}")


def _session_id(request: OpenSession) -> str:
    return hashlib.sha256(f"{request.rollout}/attempt={request.attempt}".encode()).hexdigest()[:20]
