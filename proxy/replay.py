"""Following the record of an earlier attempt: which recorded call answers a question, and where the two part.

Invariants:
1. A recorded call is answered again only if its whole history was: it is a root of the record, or its parent was replayed here and the
   question extends that. So a chain of replayed calls is one trajectory, token by token the recorded one.
2. Each recorded call is replayed at most once; which ones were is read from the session's own calls, so a restart forgets nothing.
3. A replayed call has the recorded messages and tokens. That the harness asked with slightly other words is kept beside them
   (`graph.Echo`), so that its next question is found to extend this call.
4. An answer that uses a name that this attempt does not have, a process id or a temporary file, is not replayed.

Questions are matched by what they say, not by when they come: retries, helpers and sub-agents shift nothing.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from contracts.sessions import CallTimings, Replayed, ReplayLevel
from proxy.canonical import Message, Question, by_place
from proxy.graph import Call, Echo, Graph, Place
from proxy.volatile import HarnessRules, Likeness

_LEVELS = list(ReplayLevel)


@dataclass(frozen=True)
class Match:
    """The recorded call that answers a question, and the question's place in the session that replays."""

    source: Call
    place: Place
    level: ReplayLevel
    stale: tuple[str, ...]

    def call(self, session_id: str, sequence: int, question: Question, graph: Graph, timings: CallTimings) -> Call:
        """The call as the replaying session records it: call `sequence` of `session_id`, whose calls so far are `graph`."""
        recorded = self.source.record
        segment, reason = graph.segment_for(self.place)
        record = recorded.model_copy(
            update={
                "session_id": session_id,
                "sequence": sequence,
                "parent": self.place.parent.record.sequence if self.place.parent else None,
                "segment": segment,
                "segment_reason": reason,
                "timings": timings,
                "replays": 0,
                "replayed": Replayed(session_id=recorded.session_id, sequence=recorded.sequence, level=self.level),
            }
        )
        echo = Echo(question.links[-1], question.keys[0], self.stale)
        return Call(record, question.digest, question.terms, question.window, self.source.cut, self.place.parent, echo)


@dataclass(frozen=True)
class Divergence:
    """The record goes on, but not with this question. `reason` is for people and holds nothing of the conversation."""

    reason: str


class Replay:
    """The record that one session follows."""

    def __init__(self, session_id: str, record: Graph, rules: HarnessRules) -> None:
        """`session_id` and `record`: the earlier attempt's."""
        self._session_id = session_id
        self._record = record
        self._rules = rules
        self._under_way: set[int] = set()

    def find(self, graph: Graph, question: Question, place: Place) -> Match | Divergence | None:
        """What the record has for `question`, which stands at `place` among the calls `graph`; none if the record has ended there.

        A match is taken: it is found no second time, unless `give_back` says that nothing came of it.
        """
        before = self._source_of(place.parent) if place.parent else None
        below = self._unused(graph, before) if before else []
        # Also for a question below a replayed call: a recorded one may have begun a segment although its messages extend another's.
        roots = [call for call in self._unused(graph, None) if call.window == question.window]
        apart = Place(None, question.messages, place.kind, place.reason)
        matches = [match for calls, at in ((below, place), (roots, apart)) for call in calls if (match := self._match(call, at, question))]
        if not matches:
            expected = below if place.parent else roots
            return Divergence(self._why_not(expected, place.new_messages, question)) if expected else None
        match = min(matches, key=lambda match: (_LEVELS.index(match.level), match.source.record.sequence))
        stale = {name for call in graph.calls.values() if call.echo for name in call.echo.stale}
        if _uses(match.source.record.answer, stale.union(match.stale)):
            number = match.source.record.sequence
            return Divergence(f"call {number} of the record answers with a name that this attempt does not have")
        self._under_way.add(match.source.record.sequence)
        return match

    def give_back(self, match: Match) -> None:
        """The call of `match` is either in the session's graph by now, or will not be."""
        self._under_way.discard(match.source.record.sequence)

    def _source_of(self, call: Call) -> Call | None:
        """The recorded call that `call` replays."""
        replayed = call.record.replayed
        return self._record.calls.get(replayed.sequence) if replayed and replayed.session_id == self._session_id else None

    def _unused(self, graph: Graph, parent: Call | None) -> list[Call]:
        """Recorded calls below `parent`, or roots, that were not replayed yet; in order."""
        used = {source.record.sequence for call in graph.calls.values() if (source := self._source_of(call))} | self._under_way
        return [call for sequence, call in sorted(self._record.calls.items()) if call.parent is parent and sequence not in used]

    def _match(self, call: Call, place: Place, question: Question) -> Match | None:
        """`call`, if it answers `question` at `place`."""
        if call.terms != question.terms or call.tools_key != question.tools_key:
            return None
        if len(call.record.messages) != len(place.new_messages):
            return None
        alike: list[Likeness] = []
        recorded_messages = by_place(call.record.messages, call.parent.record.answer if call.parent else None)
        new_messages = by_place(place.new_messages, place.parent.record.answer if place.parent else None)
        for recorded, new in zip(recorded_messages, new_messages, strict=True):
            likeness = self._rules.compare(recorded, new)
            if likeness is None:
                return None
            alike.append(likeness)
        placed = Place(place.parent, call.record.messages, call.record.kind, call.record.segment_reason)
        level = max((likeness.level for likeness in alike), key=_LEVELS.index)
        return Match(call, placed, level, tuple(name for likeness in alike for name in likeness.stale))

    def _why_not(self, expected: list[Call], messages: list[Message], question: Question) -> str:
        """What tells `question` from the recorded call that it comes closest to."""
        first, call = max(((self._common(call.record.messages, messages), call) for call in expected), key=lambda entry: entry[0])
        recorded = call.record.messages
        where = f"against call {call.record.sequence} of the record"
        if first < min(len(recorded), len(messages)):
            old, new = recorded[first], messages[first]
            if old["role"] != new["role"]:
                return f"{where}: new message {first} is of role {new['role']}, recorded was {old['role']}"
            sizes = f"{len(new['content'])} characters, recorded were {len(old['content'])}"
            return f"{where}: new message {first} ({new['role']}) differs from character {_first_difference(old, new)} on; it has {sizes}"
        if len(recorded) != len(messages):
            return f"{where}: {len(messages)} new messages, recorded were {len(recorded)}"
        if call.tools_key != question.tools_key:
            return f"{where}: the tools differ"
        return f"{where}: the messages are alike, but not how the answer is asked for (dialect, kind, window, length or form)"

    def _common(self, recorded: Iterable[Message], new: Iterable[Message]) -> int:
        """How many messages at the beginning are alike."""
        count = 0
        for old, now in zip(recorded, new, strict=False):
            if self._rules.compare(old, now) is None:
                break
            count += 1
        return count


def _first_difference(recorded: Message, new: Message) -> int:
    pairs = zip(recorded["content"], new["content"], strict=False)
    shorter = min(len(recorded["content"]), len(new["content"]))
    return next((index for index, (old, now) in enumerate(pairs) if old != now), shorter)


def _uses(answer: Message, names: Iterable[str]) -> bool:
    """Whether a call in `answer` has one of `names`, as a word, in its arguments."""
    arguments = "\n".join(call["function"]["arguments"] for call in answer.get("tool_calls", []))
    return any(name and re.search(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])", arguments) for name in names)
