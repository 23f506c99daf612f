"""A batch's manifest: the list of its files and the ledger of its rollouts. The trainer reads this, never a listing."""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field, model_validator

from contracts.base import Contract, FrozenContract
from contracts.failures import Outcome
from contracts.rollouts import RolloutResult

MANIFEST_FORMAT: Literal[1] = 1


class Ledger(Contract):
    """Started = completed + truncated + failed (by cause) + cancelled: no rollout is dropped without a word."""

    started: int
    completed: int = 0
    truncated: dict[str, int] = Field(default_factory=dict, description="by limit")
    failed: dict[str, int] = Field(default_factory=dict, description="by cause")
    cancelled: int = 0

    @model_validator(mode="after")
    def _balances(self) -> "Ledger":
        ended = self.completed + sum(self.truncated.values()) + sum(self.failed.values()) + self.cancelled
        if ended != self.started:
            raise ValueError(f"the ledger does not balance: {self.started} rollouts started, {ended} ended")
        return self

    @classmethod
    def of(cls, results: Iterable[RolloutResult], started: int) -> "Ledger":
        """Count `results`; raises ValueError unless they account for `started` rollouts."""
        counts: dict[str, int] = {"completed": 0, "cancelled": 0}
        truncated: dict[str, int] = {}
        failed: dict[str, int] = {}
        for result in results:
            ending = result.ending
            if ending.outcome is Outcome.TRUNCATED:
                limit = str(ending.limit)
                truncated[limit] = truncated.get(limit, 0) + 1
            elif ending.outcome is Outcome.FAILED:
                cause = str(ending.cause)
                failed[cause] = failed.get(cause, 0) + 1
            else:
                counts[ending.outcome.value] += 1
        return cls(started=started, truncated=truncated, failed=failed, **counts)


class SealBatch(FrozenContract):
    """Input of `seal_batch`."""

    run: str
    batch: str
    version: int = Field(description="policy version that was published when the batch began")
    started: int
    seconds: float = Field(0.0, description="wall clock from the first rollout's start to the last one's end")
    results: list[RolloutResult]


class Manifest(Contract):
    """`manifest.json` of a batch. Written once, after every file it names; a batch without one is not finished."""

    format: Literal[1] = MANIFEST_FORMAT
    run: str
    batch: str
    version: int
    ledger: Ledger
    seconds: float = Field(0.0, description="wall clock from the first rollout's start to the last one's end")
    results: list[RolloutResult]


class BatchSummary(FrozenContract):
    """What the run keeps of a sealed batch: small enough for a history and for the UI."""

    batch: str
    version: int
    manifest: str = Field(description="path relative to the storage root")
    started: int
    completed: int
    truncated: int
    failed: dict[str, int]
    cancelled: int
    reward_mean: float | None = Field(description="over rollouts that have a reward; none if there are none")
    reward_se: float | None = Field(None, description="standard error of the mean")
    response_tokens: int = 0
    calls: int = 0
    attempts: int = 0
    seconds: float = Field(0.0, description="wall clock from the first rollout's start to the last one's end")
    phases: dict[str, float] = Field(default_factory=dict, description="mean seconds of a rollout by phase")
