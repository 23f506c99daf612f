"""The calls of a session as a forest: which recorded call a new question extends, and which segment a call belongs to.

Invariants:
1. A call's parent is a call whose prompt and answer, as messages, are a proper prefix of the call's messages, and whose tools are
   the same. A raw prompt's parent is a call whose tokens, answer included, it begins with.
2. A segment is a chain: each of its calls but the first extends the one before. A second call that extends the same parent
   starts a segment of its own.
3. A stored record holds only what its parent does not: `messages`, `tools` and `prompt_ids` begin where the parent's record and
   answer end. A session of n turns takes O(n) space; `full` puts a record together again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from contracts.failures import Limit
from contracts.sessions import CallKind, CallRecord, SegmentReason
from proxy.canonical import RAW, Message, Question, chain, digest, message_key, message_keys, with_ids_of


@dataclass(frozen=True)
class Echo:
    """How the harness of this attempt asked a replayed question, where its record has the earlier attempt's messages.

    `link` is the last of the question's `links` and `opening` the first of its `keys`. `stale` are names that the record has and this
    attempt does not: a process id, a temporary file.
    """

    link: str
    opening: str
    stale: tuple[str, ...] = ()


@dataclass(eq=False)
class Call:
    """A finished call. `record` is in stored form (invariant 3); `cut` is the session's limit that cut the answer, if one did.

    `question` and `terms` are the question's. A later question is found to extend this call by `link`: what the harness itself has asked
    and been answered so far, which for a replayed call is not what the record says.
    """

    record: CallRecord
    question: str
    terms: str
    window: int
    cut: Limit | None
    parent: "Call | None"
    echo: Echo | None = None
    link: str = field(init=False)
    tools_key: str = field(init=False)
    extended: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        start = self.parent.link if self.parent else ""
        keys = message_keys(self.record.messages, self.parent.record.answer if self.parent else None)
        asked = self.echo.link if self.echo else chain(keys, start)[-1]
        self.link = chain([message_key(self.record.answer)], asked)[-1]
        self.tools_key = self.parent.tools_key if self.parent else digest(self.record.tools)

    @property
    def opening(self) -> str:
        """Key of the first message that the harness sent."""
        return self.echo.opening if self.echo else message_key(self.lineage[0].record.messages[0])

    @property
    def lineage(self) -> "list[Call]":
        """The chain of parents, this call last."""
        calls = [self]
        while calls[-1].parent:
            calls.append(calls[-1].parent)
        return calls[::-1]

    @property
    def prompt_ids(self) -> list[int]:
        """The whole prompt."""
        ids: list[int] = []
        for call in self.lineage:
            ids += call.record.prompt_ids
            if call is not self:
                ids += call.record.response_ids
        return ids

    @property
    def full(self) -> CallRecord:
        """The record as the session API shows it."""
        lineage = self.lineage
        messages: list[Message] = []
        for call in lineage:
            messages += call.record.messages
            if call is not self:
                messages.append(call.record.answer)
        return self.record.model_copy(update={"messages": messages, "tools": lineage[0].record.tools, "prompt_ids": self.prompt_ids})


@dataclass(frozen=True)
class Place:
    """Where a question stands: what it extends, by which messages, or why it extends nothing."""

    parent: Call | None
    new_messages: list[Message]
    kind: CallKind
    reason: SegmentReason


class Graph:
    """The finished calls of one session."""

    def __init__(self, calls: Iterable[Call] = ()) -> None:
        self.calls: dict[int, Call] = {}
        self._by_link: dict[tuple[str, str], Call] = {}
        self._links: set[str] = set()
        self._by_question: dict[str, Call] = {}
        self._last_of_segment: dict[int, Call] = {}
        for call in calls:
            self.add(call)

    def add(self, call: Call) -> None:
        """Take a call in. Its record says which segment it is in."""
        self.calls[call.record.sequence] = call
        self._by_link[(call.tools_key, call.link)] = call
        self._links.add(call.link)
        self._by_question[call.question] = call
        self._last_of_segment[call.record.segment] = call
        if call.parent:
            call.parent.extended = True

    @property
    def segments(self) -> set[int]:
        """Numbers of the segments so far."""
        return set(self._last_of_segment)

    def without(self, call: Call) -> "Graph":
        """The graph as it was before `call`, which could not be made durable."""
        return Graph(other for other in self.calls.values() if other is not call)

    def asked_before(self, question: Question) -> Call | None:
        """The latest finished call with this very question, unless the harness has gone on from its answer."""
        call = self._by_question.get(question.digest)
        return None if call is None or call.extended else call

    def place(self, question: Question) -> Place:
        """Where `question` stands: below the call with the longest history that it extends."""
        history_known = False
        for length in range(len(question.links) - 1, 0, -1):
            if question.messages[length]["role"] == "assistant":
                break  # an assistant message that was never sampled here: nothing before it can be extended
            link = question.links[length - 1]
            if parent := self._by_link.get((question.tools_key, link)):
                new = with_ids_of(parent.record.answer, question.messages[length - 1], question.messages[length:])
                return Place(parent, new, question.kind, parent.record.segment_reason)
            history_known = history_known or link in self._links
        kind = self._kind(question)
        return Place(None, question.messages, kind, self._reason(question, kind, history_known))

    def place_raw(self, question: Question, prompt_ids: list[int]) -> Place:
        """Where a raw prompt stands: below the segment that has the most of its tokens, and no others."""
        longest, found = 0, None
        for last in self._last_of_segment.values():
            recorded = last.prompt_ids + last.record.response_ids
            if longest < len(recorded) < len(prompt_ids) and prompt_ids[: len(recorded)] == recorded:
                longest, found = len(recorded), last
        if found is None:
            return Place(None, question.messages, question.kind, self._reason(question, question.kind, history_known=False))
        return Place(found, [{"role": RAW, "content": prompt_ids[longest:]}], question.kind, found.record.segment_reason)

    def apart(self, question: Question) -> Place:
        """The place of a question whose tokens cannot extend the call that its messages extend."""
        kind = self._kind(question)
        return Place(None, question.messages, kind, self._reason(question, kind, history_known=False))

    def segment_for(self, place: Place) -> tuple[int, SegmentReason]:
        """The segment that a call at `place` belongs to, and why that segment began."""
        parent = place.parent
        if parent and self._last_of_segment[parent.record.segment] is parent:
            return parent.record.segment, parent.record.segment_reason
        fresh = max(self._last_of_segment, default=-1) + 1
        return fresh, SegmentReason.REWRITE if parent else place.reason

    def _kind(self, question: Question) -> CallKind:
        """A call without tools and with another opening, in a session that has used tools, is a helper's: a title, a summary."""
        if question.kind is not CallKind.TURN or question.tools or not self.calls:
            return question.kind
        roots = [call for call in self.calls.values() if call.parent is None and call.record.tools]
        opening = question.keys[0]
        if roots and all(call.opening != opening for call in roots):
            return CallKind.SIDE_CALL
        return CallKind.TURN

    def _reason(self, question: Question, kind: CallKind, history_known: bool) -> SegmentReason:
        named = {
            CallKind.SUBAGENT: SegmentReason.SUBAGENT,
            CallKind.SIDE_CALL: SegmentReason.SIDE_CALL,
            CallKind.COMPACTION: SegmentReason.COMPACTION,
        }
        if not self.calls:
            return SegmentReason.FIRST
        if kind in named:
            return named[kind]
        if question.window > max(call.window for call in self.calls.values()):
            return SegmentReason.COMPACTION
        return SegmentReason.TOOLS_CHANGED if history_known else SegmentReason.REWRITE
