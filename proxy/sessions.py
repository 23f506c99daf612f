"""Sessions: who may ask, how much is left, what was asked.

Keys are not stored. A key is `of-SESSION-MAC`, where MAC is an HMAC of the session's id under the admin token; it is checked by
making it again, in constant time. Whoever lacks the token cannot make one, and a key opens its own session alone.
"""

import hashlib
import hmac
import time
from dataclasses import dataclass, field

from pydantic import SecretStr

from contracts.failures import Limit
from contracts.sessions import CallRecord, OpenSession, SessionStatus
from proxy.errors import LimitReachedError, UnauthorizedError
from proxy.graph import Graph
from proxy.journal import Journal, StoredSession
from proxy.metrics import SESSIONS


class SessionConflictError(Exception):
    """A session with this identity is there already, on other terms."""


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

    @classmethod
    def of(cls, stored: StoredSession) -> "Session":
        """The session as it stood in the journal."""
        return cls(
            stored.session_id,
            stored.opened,
            stored.closed,
            stored.limit_reached,
            stored.engine_failures,
            stored.graph,
            next_sequence=max(stored.graph.calls, default=-1) + 1,
        )

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
        )

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
        SESSIONS.set(len(self._open))
        return len(self._open)

    async def open(self, request: OpenSession) -> Session:
        """Open the session of (rollout, attempt), or find it.

        A repeat may move the deadline back, because the caller may have had to wait; every other difference is a
        SessionConflictError.
        """
        session_id = _session_id(request)
        session = await self.get(session_id)
        if session is None:
            session = self._open.setdefault(session_id, Session(session_id, request))
        later = session.opened.model_copy(update={"deadline": max(session.opened.deadline, request.deadline)})
        if later.model_copy(update={"deadline": request.deadline}) != request:
            raise SessionConflictError(f"session {session_id} of {request.rollout} is open on other terms")
        if not session.closed:
            session.opened = later
            await self._journal.open_session(session_id, later)
            SESSIONS.set(len(self._open))
        return session

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

    async def save(self, session: Session) -> None:
        """Make the session's own counters durable."""
        await self._journal.update_session(
            session.session_id, closed=session.closed, limit=session.limit, engine_failures=session.engine_failures
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


def _session_id(request: OpenSession) -> str:
    return hashlib.sha256(f"{request.rollout}/attempt={request.attempt}".encode()).hexdigest()[:20]
