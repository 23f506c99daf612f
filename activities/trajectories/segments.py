"""A session's calls as segments: one token sequence each, with what the policy sampled masked in.

Invariants:
1. Tokens are copied, never computed: the prompt of the first call, then by turns what was sampled and what the next prompt adds.
2. `response_mask` is true exactly for sampled tokens; their log-probabilities and versions are those recorded with them.
3. A call that does not extend its parent's tokens cannot be in the parent's segment: that is an error of the record, not a guess.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from contracts.sessions import CallKind, CallRecord, SegmentReason, VersionSpan


@dataclass
class Segment:
    """A segment. `response_ids`, `mask` and `logprobs` have equal length; spans count in `response_ids`."""

    number: int
    reason: SegmentReason
    kind: CallKind
    dialect: str
    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0

    @property
    def trainable(self) -> bool:
        """Side calls (titles, small helpers) are kept, and kept out of training."""
        return self.kind is not CallKind.SIDE_CALL


def segments(calls: Sequence[CallRecord]) -> list[Segment]:
    """The segments of a session, in order. Raises ValueError if a record contradicts itself."""
    found: dict[int, Segment] = {}
    for call in sorted(calls, key=lambda call: call.sequence):
        segment = found.get(call.segment)
        if segment is None:
            segment = found[call.segment] = Segment(
                number=call.segment,
                reason=call.segment_reason,
                kind=call.kind,
                dialect=call.dialect,
                prompt_ids=list(call.prompt_ids),
            )
        else:
            _add(segment, _added_tokens(segment, call), sampled=False, logprobs=None)
        start = len(segment.response_ids)
        _add(segment, call.response_ids, sampled=True, logprobs=call.logprobs)
        segment.versions += [VersionSpan(version=span.version, start=start + span.start, end=start + span.end) for span in call.versions]
        segment.messages = [*call.messages, call.answer]
        segment.tools = call.tools
        segment.calls += 1
        segment.prompt_tokens += len(call.prompt_ids)
        segment.response_tokens += len(call.response_ids)
    return [found[number] for number in sorted(found)]


def _added_tokens(segment: Segment, call: CallRecord) -> list[int]:
    """What the call's prompt adds to the tokens so far: tool output and template text."""
    before = segment.prompt_ids + segment.response_ids
    if call.prompt_ids[: len(before)] != before:
        raise ValueError(f"call {call.sequence} is recorded in segment {call.segment} but does not extend its tokens")
    return call.prompt_ids[len(before) :]


def _add(segment: Segment, ids: list[int], *, sampled: bool, logprobs: list[float] | None) -> None:
    segment.response_ids += ids
    segment.mask += [sampled] * len(ids)
    segment.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)
