"""The trainer's API and the publication of weights.

`PUT /updates/{run}/{iteration}` with an `UpdateRequest` starts an update or finds the one that runs or has finished;
`GET` of the same path shows its `UpdateStatus`. Paths are relative to the storage root, which both sides are given.
"""

from typing import Literal

from pydantic import Field

from contracts.base import Contract, FrozenContract
from contracts.config import SftConfig, TrainingConfig


class UpdateRequest(FrozenContract):
    """Make version `iteration + 1` out of version `iteration` and one batch."""

    run: str
    iteration: int = Field(ge=0)
    manifest: str = Field(description="path of the batch's manifest, relative to the storage root")
    base_model: str = Field(description="directory of the run's starting weights: version 0")
    seed: int = 0
    max_context: int
    temperature: float = Field(1.0, description="at which the batch was sampled; log-probabilities are recomputed at it")
    method: TrainingConfig | SftConfig

    @property
    def version(self) -> int:
        """The policy version that the update makes."""
        return self.iteration + 1


class UpdateResult(FrozenContract):
    """A finished update: exported weights at `version_prefix(run, version)`, its `manifest.json` written last."""

    version: int
    rows: int = Field(description="rows trained on")
    rows_left_out: dict[str, int] = Field(default_factory=dict, description="rows or rollouts left out, by reason")
    metrics: dict[str, float] = Field(default_factory=dict, description="loss, grad_norm, entropy, logprob_diff_max …")
    seconds: dict[str, float] = Field(default_factory=dict, description="by phase: load, logprobs, update, save, export")


class UpdateStatus(Contract):
    """Where an update stands."""

    state: Literal["absent", "running", "finished", "failed"]
    step: int = 0
    steps: int = 0
    phase: str = ""
    result: UpdateResult | None = None
    error: str = ""
    retryable: bool = Field(True, description="whether the same request may succeed later (false: bad batch or config)")


class VersionManifest(Contract):
    """`manifest.json` beside exported weights: what a publisher may load, and what it must find in the engine."""

    format: Literal[1] = 1
    run: str
    version: int
    parent: int | None
    batch_digest: str = Field("", description="sha256 of the manifest trained on, hex")
    files: dict[str, str] = Field(description="file name to sha256, hex")
    tensors: list[str] = Field(description="sorted names of all tensors in the safetensors files")
    result: UpdateResult | None = None


class PublishRequest(FrozenContract):
    """Make every engine of a pool hold `version` of `run`. Idempotent: an engine that has it already is left alone."""

    run: str
    version: int
    base_model: str = Field(description="directory of the run's starting weights: version 0")
    engine: str = "policy"


class Published(FrozenContract):
    """Result of a publication."""

    version: int
    engines: int = Field(description="engines in the pool")
    loaded: int = Field(description="engines that had to load")
    seconds: float


def weight_label(run: str, version: int) -> str:
    """The engine's weight version: names the run as well, so that tokens of another run's weights cannot pass unnoticed."""
    return f"{run}@{version}"


def parse_weight_label(label: str) -> tuple[str, int] | None:
    """(run, version) of a label made by `weight_label`; none for any other label, such as a fresh engine's."""
    run, separator, version = label.rpartition("@")
    return (run, int(version)) if separator and run and version.isdecimal() else None
