"""Batches made by hand: manifests and Parquet files as the worker would write them."""

import hashlib
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from contracts.batches import Ledger, Manifest
from contracts.failures import Cause, Outcome
from contracts.identity import RolloutId, iteration_batch, manifest_path
from contracts.rollouts import Ending, RolloutResult, TrajectoryRef
from contracts.trajectory import TRAJECTORY_SCHEMA
from infra.storage import Storage


@dataclass(frozen=True)
class Made:
    """A rollout. `segments` is the number of rows that its response is cut into; `cause` makes it a failure."""

    group: int
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    reward: float | None = 1.0
    mask: list[bool] | None = None
    cause: Cause | None = None
    segments: int = 1


def seal(storage: Storage, run: str, iteration: int, rollouts: Sequence[Made]) -> str:
    """Write files and manifest; returns the manifest's path."""
    batch = iteration_batch(iteration)
    results = []
    for member, made in enumerate(rollouts):
        identity = RolloutId(run=run, batch=batch, group=made.group, member=member)
        ending = Ending(outcome=Outcome.FAILED if made.cause else Outcome.COMPLETED, cause=made.cause)
        mask = made.mask or [True] * len(made.response_ids)
        cuts = [len(made.response_ids) * place // made.segments for place in range(made.segments + 1)]
        rows = [dict.fromkeys(TRAJECTORY_SCHEMA.names, None) | {
            "run": run, "batch": batch, "group": made.group, "member": member, "task": "t", "task_digest": "", "rollout": str(identity),
            "attempt": 1, "session": "s", "segment": segment, "trainable": True, "harness": "h", "harness_version": "1", "policy": run,
            "engine": "policy", "prompt_ids": made.prompt_ids + made.response_ids[:start], "response_ids": made.response_ids[start:end],
            "response_mask": mask[start:end],
            "logprobs": made.logprobs[start:end], "versions": [], "temperature": 1.0, "reward": made.reward, "reward_parts": [],
            "outcome": ending.outcome.value, "cause": made.cause, "message": "", "calls": 1, "prompt_tokens": 1, "response_tokens": 1,
            "phases": [], "harness_cpu_seconds": 0.0, "harness_peak_memory_mb": 0.0, "messages": "[]", "tools": "[]", "images": [],
        } for segment, (start, end) in enumerate(itertools.pairwise(cuts))]  # fmt: skip
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, schema=TRAJECTORY_SCHEMA), buffer)
        storage.write(identity.trajectory_path, buffer.getvalue())
        reference = TrajectoryRef(path=identity.trajectory_path, rows=len(rows), digest=hashlib.sha256(buffer.getvalue()).hexdigest())
        results.append(RolloutResult(rollout=identity, task="t", ending=ending, attempts=1, reward=made.reward, trajectory=reference))
    manifest = Manifest(run=run, batch=batch, version=iteration, ledger=Ledger.of(results, len(results)), results=results)
    path = manifest_path(run, batch)
    storage.write(path, manifest.model_dump_json().encode())
    return path
