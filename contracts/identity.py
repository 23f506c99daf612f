"""Names that survive retries: a rollout's identity decides its workflow id, its sandbox id and its path in storage."""

import hashlib
import re
from typing import Annotated

from pydantic import StringConstraints

from contracts.base import FrozenContract

RUN_NAME = re.compile(r"^[a-z0-9][a-z0-9-]{0,62}$")
RunName = Annotated[str, StringConstraints(pattern=RUN_NAME.pattern)]


def iteration_batch(iteration: int) -> str:
    """The batch that one policy update trains on."""
    return f"iteration={iteration:06d}"


def evaluation_batch(version: int, split: str, mode: str) -> str:
    """The batch that measures one policy version on one split of tasks in one sampling mode."""
    return f"evaluation={version:06d}-{split}-{mode}"


def version_prefix(run: str, version: int) -> str:
    """Where the weights of a policy version lie, relative to the storage root. Version 0 is the run's starting model."""
    return f"runs/{run}/versions/version={version:06d}"


def checkpoint_prefix(run: str, version: int) -> str:
    """Where the trainer's state after making a version lies (weights, optimizer, random state), relative to the storage root."""
    return f"runs/{run}/checkpoints/version={version:06d}"


def batch_prefix(run: str, batch: str) -> str:
    """Where a batch's trajectories and manifest lie, relative to the storage root."""
    return f"runs/{run}/{batch}"


def manifest_path(run: str, batch: str) -> str:
    """Where a batch's manifest lies, relative to the storage root."""
    return f"{batch_prefix(run, batch)}/manifest.json"


class RolloutId(FrozenContract):
    """Which rollout: the `member`-th try at the task of `group` in `batch` of `run`. The same across attempts."""

    run: RunName
    batch: str
    group: int
    member: int

    def __str__(self) -> str:
        return f"{self.run}/{self.batch}/group={self.group:04d}/member={self.member:03d}"

    @property
    def workflow_id(self) -> str:
        """Id of the `Rollout` workflow, unique in the namespace."""
        return str(self)

    @property
    def trajectory_path(self) -> str:
        """Path of the Parquet file, relative to the storage root; a repeat overwrites itself."""
        return f"{batch_prefix(self.run, self.batch)}/group={self.group:04d}/member={self.member:03d}.parquet"

    def sandbox_id(self, attempt: int) -> str:
        """Id of an attempt's sandbox: a DNS label, so that it can name a pod as well as a directory."""
        digest = hashlib.sha256(str(self).encode()).hexdigest()[:12]
        return f"{self.run[:40].rstrip('-')}-{digest}-a{attempt}"
