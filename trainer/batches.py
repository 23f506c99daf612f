"""From a batch's manifest to the rows that may teach.

Invariants:
1. The manifest decides which files are read; every rollout in it is either used or counted in `left_out` under one reason.
2. A file is the one that the manifest means: its digest is checked. A row that cannot be trained on is an error, not a guess.
3. A rollout that failed (infrastructure, task) enters neither loss nor baseline. A truncated one does, if the config says so.
4. Only tokens that the policy sampled are masked in; the recorded log-probabilities stay beside them.
"""

import hashlib
import io
from collections import Counter
from dataclasses import dataclass, field

import pyarrow.parquet as pq

from contracts.batches import Manifest
from contracts.failures import Outcome
from contracts.rollouts import RolloutResult
from contracts.trajectory import TRAJECTORY_SCHEMA
from infra.storage import Storage


class BatchError(ValueError):
    """The batch cannot be trained on, and will not be by asking again."""


@dataclass(frozen=True)
class Row:
    """A segment: `response_ids`, `mask` and `logprobs` have equal length; `rollout` is its place in `Batch.rollouts`."""

    rollout: int
    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[bool]
    logprobs: list[float]

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.mask)


@dataclass(frozen=True)
class Rollout:
    """A rollout that teaches: the group it is compared in, and its reward."""

    group: int
    reward: float


@dataclass
class Batch:
    """What an update trains on."""

    rollouts: list[Rollout] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def read_manifest(storage: Storage, path: str) -> Manifest:
    """Raises BatchError if there is none or it is of another format."""
    try:
        return Manifest.model_validate_json(storage.read(path))
    except FileNotFoundError as error:
        raise BatchError(f"the batch is not sealed: {error}") from error
    except ValueError as error:
        raise BatchError(f"{storage.url(path)} is not a manifest: {error}") from error


def read_batch(
    storage: Storage,
    manifest: Manifest,
    *,
    max_context: int,
    train_on_truncated: bool = True,
    min_reward: float | None = None,
    min_group: int = 1,
) -> Batch:
    """Read the rows of a batch.

    Args:
        max_context: longer rows are left out.
        train_on_truncated: whether truncated rollouts teach with the reward they got.
        min_reward: leave out rollouts below it (imitation of good demonstrations only).
        min_group: a group with fewer rollouts has no baseline and is left out whole.
    """
    batch = Batch()
    candidates: list[tuple[RolloutResult, list[Row]]] = []
    for result in manifest.results:
        reason = _reason(result, train_on_truncated, min_reward)
        rows = [] if reason else _rows(storage, result)
        if not reason and not rows:
            reason = "no trainable segment"
        if not reason and any(row.length > max_context for row in rows):
            reason = "longer than max_context"
        if reason:
            batch.left_out[reason] += 1
        else:
            candidates.append((result, rows))
    sizes = Counter(result.rollout.group for result, _ in candidates)
    for result, rows in candidates:
        if sizes[result.rollout.group] < min_group:
            batch.left_out["alone in its group"] += 1
            continue
        assert result.reward is not None
        place = len(batch.rollouts)
        batch.rollouts.append(Rollout(group=result.rollout.group, reward=result.reward))
        batch.rows += [Row(place, row.prompt_ids, row.response_ids, row.mask, row.logprobs) for row in rows]
    return batch


def _reason(result: RolloutResult, train_on_truncated: bool, min_reward: float | None) -> str:
    outcome = result.ending.outcome
    if outcome in {Outcome.FAILED, Outcome.CANCELLED}:
        return f"{outcome.value}: {result.ending.cause}" if result.ending.cause else outcome.value
    if outcome is Outcome.TRUNCATED and not train_on_truncated:
        return f"truncated: {result.ending.limit}"
    if result.reward is None:
        return "no reward"
    if min_reward is not None and result.reward < min_reward:
        return "reward below min_reward"
    return ""


def _rows(storage: Storage, result: RolloutResult) -> list[Row]:
    if result.trajectory is None:
        return []
    path = result.trajectory.path
    try:
        data = storage.read(path)
    except FileNotFoundError as error:
        raise BatchError(f"the manifest names a file that is not there: {error}") from error
    if hashlib.sha256(data).hexdigest() != result.trajectory.digest:
        raise BatchError(f"{storage.url(path)} is not the file that the manifest means: its digest differs")
    rows = []
    for record in pq.read_table(io.BytesIO(data), schema=TRAJECTORY_SCHEMA).to_pylist():
        if not record["trainable"] or not any(record["response_mask"]):
            continue
        row = Row(0, record["prompt_ids"], record["response_ids"], record["response_mask"], record["logprobs"])
        if not row.prompt_ids or not len(row.response_ids) == len(row.mask) == len(row.logprobs):
            raise BatchError(
                f"{storage.url(path)}, segment {record['segment']}: {len(row.prompt_ids)} prompt tokens, {len(row.response_ids)} response "
                f"tokens, {len(row.mask)} in the mask, {len(row.logprobs)} log-probabilities"
            )
        rows.append(row)
    return rows
