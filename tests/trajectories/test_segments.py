"""Calls into rows and back: nothing is computed, everything is where it was sampled."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.trajectories.record import record_trajectory, rows, to_parquet
from activities.trajectories.segments import segments
from contracts.config import HarnessConfig, SandboxConfig
from contracts.failures import Cause, Outcome
from contracts.identity import RolloutId
from contracts.rollouts import Attempt, Ending, HarnessEnd, RecordTrajectory, RolloutSpec, Score, TaskRef
from contracts.sessions import CallKind, CallRecord, CallTimings, Sampling, SegmentReason, SessionLimits, VersionSpan
from contracts.trajectory import TRAJECTORY_SCHEMA
from infra.settings import settings
from tests.support.processes import free_port

TOKENS = st.lists(st.integers(0, 50_000), min_size=1, max_size=6)
TURNS = st.lists(st.tuples(TOKENS, TOKENS, st.integers(0, 3)), min_size=1, max_size=5)  # added, sampled, version


def record(
    turns: list[tuple[list[int], list[int], int]], segment: int = 0, first: int = 0, kind: CallKind = CallKind.TURN
) -> list[CallRecord]:
    """A chain of calls: each prompt is all before it and what was added."""
    calls: list[CallRecord] = []
    prompt: list[int] = []
    for number, (added, sampled, version) in enumerate(turns):
        prompt = prompt + added
        calls.append(
            CallRecord(
                session_id="s", sequence=first + number, parent=first + number - 1 if number else None, segment=segment,
                segment_reason=SegmentReason.FIRST, kind=kind, dialect="chat", engine="policy",
                messages=[{"role": "user", "content": str(number)}], answer={"role": "assistant", "content": "x"}, prompt_ids=prompt,
                response_ids=sampled, logprobs=[-float(token + 1) for token in sampled],
                versions=[VersionSpan(version=version, start=0, end=len(sampled))], finish_reason="stop",
                timings=CallTimings(arrived=0, waited=0, first_token=0, total=0),
            )
        )  # fmt: skip
        prompt = prompt + sampled
    return calls


@given(TURNS)
def test_a_chain_of_calls_is_one_row_that_says_what_was_sampled(turns: list[tuple[list[int], list[int], int]]) -> None:
    (segment,) = segments(record(turns))
    assert segment.prompt_ids == turns[0][0]
    sampled = [token for token, flag in zip(segment.response_ids, segment.mask, strict=True) if flag]
    assert sampled == [token for _, tokens, _ in turns for token in tokens]
    assert segment.prompt_ids + segment.response_ids == [token for added, tokens, _ in turns for token in added + tokens]
    for token, flag, logprob in zip(segment.response_ids, segment.mask, segment.logprobs, strict=True):
        assert logprob == (-float(token + 1) if flag else 0.0)
    versions = [span.version for span in segment.versions for _ in range(span.start, span.end)]
    assert versions == [version for _, tokens, version in turns for _ in tokens]
    assert all(all(segment.mask[span.start : span.end]) for span in segment.versions)


@given(TURNS, TURNS)
def test_segments_are_kept_apart(one: list[Any], other: list[Any]) -> None:
    calls = record(one) + record(other, segment=1, first=len(one), kind=CallKind.SIDE_CALL)
    first, second = segments(list(reversed(calls)))
    assert (first.calls, second.calls) == (len(one), len(other))
    assert first.trainable
    assert not second.trainable


def test_a_call_that_does_not_extend_its_segment_is_an_error() -> None:
    calls = record([([1], [2], 0), ([3], [4], 0)])
    broken = calls[1].model_copy(update={"prompt_ids": [9, 9, 9]})
    with pytest.raises(ValueError, match="does not extend its tokens"):
        segments([calls[0], broken])


def request(ending: Ending, score: Score | None = None) -> RecordTrajectory:
    spec = RolloutSpec(
        rollout=RolloutId(run="r", batch="iteration=000001", group=2, member=3), task=TaskRef(name="t", path="/t", digest="d"),
        harness=HarnessConfig(), sandbox=SandboxConfig(), policy="r", sampling=Sampling(temperature=0.5), limits=SessionLimits(),
    )  # fmt: skip
    return RecordTrajectory(
        attempt=Attempt(spec=spec, number=2), session_id="s", ending=ending, harness_version="1", score=score,
        harness=HarnessEnd(exit_code=0, seconds=1, cpu_seconds=0.5), phases={"harness": 1.5},
    )  # fmt: skip


def read(data: bytes) -> list[dict[str, Any]]:
    table = pq.read_table(io.BytesIO(data))
    assert table.schema.equals(TRAJECTORY_SCHEMA)
    found: list[dict[str, Any]] = table.to_pylist()
    return found


@given(TURNS)
def test_what_is_written_is_read_back(turns: list[Any]) -> None:
    found = segments(record(turns))
    scored = request(Ending(outcome=Outcome.COMPLETED), Score(reward=0.25, parts={"a": 0.25}, seconds=0))
    (row,) = read(to_parquet(rows(scored, found)))
    assert (row["response_ids"], row["response_mask"]) == (found[0].response_ids, found[0].mask)
    assert (row["reward"], dict(row["reward_parts"]), row["temperature"], row["attempt"]) == (0.25, {"a": 0.25}, 0.5, 2)
    assert json.loads(row["messages"])[-1] == {"role": "assistant", "content": "x"}


def test_an_ending_without_a_call_is_on_file_and_its_reward_is_null() -> None:
    failed = request(Ending(outcome=Outcome.FAILED, cause=Cause.SANDBOX_LOST, message="gone"))
    (row,) = read(to_parquet(rows(failed, [])))
    assert (row["outcome"], row["cause"], row["message"]) == ("failed", "sandbox_lost", "gone")
    assert row["reward"] is None
    assert not row["trainable"]
    assert row["response_ids"] == []


@pytest.fixture
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OPENFORGE_HOME", str(tmp_path))
    monkeypatch.setenv("OPENFORGE_PROXY_URL", f"http://127.0.0.1:{free_port()}")  # nobody listens
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.mark.usefixtures("_home")
@pytest.mark.parametrize("away", [Cause.STORAGE_UNAVAILABLE, Cause.PROXY_UNAVAILABLE])
async def test_recording_is_asked_for_again_while_storage_or_the_proxy_is_away(away: Cause, tmp_path: Path) -> None:
    asked = request(Ending(outcome=Outcome.COMPLETED))
    if away is Cause.STORAGE_UNAVAILABLE:
        asked = asked.model_copy(update={"session_id": ""})
        (tmp_path / "storage").write_text("a file where the directory should be")
    with pytest.raises(ApplicationError) as caught:
        await ActivityEnvironment().run(record_trajectory, asked)
    assert (caught.value.type, caught.value.non_retryable) == (away, False)
