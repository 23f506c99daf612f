"""`record_trajectory`: the calls of a rollout's session, with how it ended, as one Parquet file at the rollout's own path."""

import asyncio
import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from temporalio import activity

from activities.failures import failing_as, outlasting
from activities.heartbeats import beating
from activities.sessions import ProxyClient
from activities.trajectories.segments import Segment, segments
from contracts.failures import Cause
from contracts.rollouts import RecordTrajectory, TrajectoryRef
from contracts.runs import Activity
from contracts.sessions import SessionCalls
from contracts.trajectory import TRAJECTORY_SCHEMA
from infra.settings import settings
from infra.storage import Storage


@activity.defn(name=Activity.RECORD_TRAJECTORY)
async def record_trajectory(request: RecordTrajectory) -> TrajectoryRef:
    """Write the file; a repeat overwrites it with the same content. What is away, storage or the proxy, is waited for."""
    path = request.attempt.spec.rollout.trajectory_path
    async with beating():
        calls = SessionCalls(session_id="", calls=[])
        if request.session_id:
            with outlasting():
                async with ProxyClient(settings()) as proxy:
                    calls = await proxy.calls(request.session_id)
        with failing_as(Cause.INTERNAL, "make the trajectory"):
            found = segments(calls.calls)
            data = to_parquet(rows(request, found))
        with outlasting():
            digest = await asyncio.to_thread(Storage.of(settings()).write, path, data)
    versions = [span.version for segment in found for span in segment.versions]
    return TrajectoryRef(
        path=path,
        rows=max(1, len(found)),
        digest=digest,
        calls=sum(segment.calls for segment in found),
        prompt_tokens=sum(segment.prompt_tokens for segment in found),
        response_tokens=sum(segment.response_tokens for segment in found),
        min_version=min(versions, default=None),
        max_version=max(versions, default=None),
    )


def rows(request: RecordTrajectory, found: list[Segment]) -> list[dict[str, Any]]:
    """One row a segment; one row without tokens if no call was recorded, so that the ending is on file."""
    spec, ending = request.attempt.spec, request.ending
    rollout, harness, score = spec.rollout, request.harness, request.score
    common = {
        "run": rollout.run,
        "batch": rollout.batch,
        "group": rollout.group,
        "member": rollout.member,
        "task": spec.task.name,
        "task_digest": spec.task.digest,
        "rollout": str(rollout),
        "attempt": request.attempt.number,
        "session": request.session_id,
        "harness": spec.harness.name,
        "harness_version": request.harness_version,
        "policy": spec.policy,
        "engine": spec.engine,
        "temperature": spec.sampling.temperature,
        "reward": score.reward if score else None,
        "reward_parts": sorted((score.parts if score else {}).items()),
        "outcome": ending.outcome.value,
        "cause": ending.cause.value if ending.cause else None,
        "limit": ending.limit.value if ending.limit else None,
        "message": ending.message,
        "phases": sorted(request.phases.items()),
        "harness_cpu_seconds": harness.cpu_seconds if harness else 0.0,
        "harness_peak_memory_mb": harness.peak_memory_mb if harness else 0.0,
        "images": [],
    }
    return [common | _segment_columns(segment) for segment in found] or [common | _NO_SEGMENT]


_NO_SEGMENT: dict[str, Any] = {
    "segment": 0,
    "segment_reason": None,
    "kind": None,
    "trainable": False,
    "dialect": None,
    "prompt_ids": [],
    "response_ids": [],
    "response_mask": [],
    "logprobs": [],
    "versions": [],
    "calls": 0,
    "prompt_tokens": 0,
    "response_tokens": 0,
    "messages": "[]",
    "tools": "[]",
}


def _segment_columns(segment: Segment) -> dict[str, Any]:
    return {
        "segment": segment.number,
        "segment_reason": segment.reason.value,
        "kind": segment.kind.value,
        "trainable": segment.trainable,
        "dialect": segment.dialect,
        "prompt_ids": segment.prompt_ids,
        "response_ids": segment.response_ids,
        "response_mask": segment.mask,
        "logprobs": segment.logprobs,
        "versions": [span.model_dump() for span in segment.versions],
        "calls": segment.calls,
        "prompt_tokens": segment.prompt_tokens,
        "response_tokens": segment.response_tokens,
        "messages": json.dumps(segment.messages, ensure_ascii=False),
        "tools": json.dumps(segment.tools, ensure_ascii=False),
    }


def to_parquet(records: list[dict[str, Any]]) -> bytes:
    """The bytes of a trajectory file."""
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records, schema=TRAJECTORY_SCHEMA), buffer, compression="zstd")
    return buffer.getvalue()
