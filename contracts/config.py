"""The configuration of a run: what a recipe holds and what `TrainingRun` takes as input.

Paths in a recipe are relative to the recipe's file; `cli` makes them absolute before a run starts. A run started by
`temporal workflow start` gives absolute paths or URLs.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from contracts.base import FrozenContract
from contracts.identity import RunName
from contracts.sessions import Sampling, SessionLimits

Label = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,32}$")]


class PolicyConfig(FrozenContract):
    """The model that is trained."""

    model: str = Field(description="directory of the starting weights in Hugging Face format: policy version 0")
    max_context: int = Field(2048, ge=64, description="tokens, prompt and answer together")


class HarnessConfig(FrozenContract):
    """The agent. `options` are the adapter's own; an unknown one is an error that lists those it has."""

    name: str = "codex"
    options: dict[str, Any] = Field(default_factory=dict)


class SandboxConfig(FrozenContract):
    """Where harness and verifier run, and how much of the machine they may use. A task may ask for less or more."""

    backend: str = "bubblewrap"
    cpus: float = Field(1.0, gt=0)
    memory_mb: int = Field(2048, ge=64)
    pids: int = Field(256, ge=8)
    file_size_mb: int = Field(256, ge=1, description="size of one file")


class RolloutConfig(FrozenContract):
    """How many rollouts an iteration makes, how many run at once, and what each may use."""

    groups: int = Field(8, ge=1, description="tasks an iteration")
    group_size: int = Field(8, ge=1, description="rollouts a task")
    concurrency: int = Field(8, ge=1, description="rollouts in flight at once")
    max_attempts: int = Field(3, ge=1, description="attempts a rollout, when infrastructure fails")
    sampling: Sampling = Sampling()
    limits: SessionLimits = SessionLimits()
    pause_after_failures: int = Field(16, ge=1, description="rollouts in a row lost to infrastructure before the run pauses")


class SftConfig(FrozenContract):
    """Supervised fine-tuning on recorded trajectories, with the trainer's own engine."""

    epochs: int = Field(3, ge=1)
    batch_size: int = Field(16, ge=1, description="rows an optimizer step")
    learning_rate: float = Field(1e-5, gt=0)
    warmup_steps: int = Field(20, ge=0)
    schedule: Literal["constant", "cosine"] = "cosine"
    min_reward: float | None = Field(None, description="leave out demonstrations with a lower reward; none: keep all")


class WarmStartConfig(FrozenContract):
    """Iteration 0 as imitation: demonstrations by another engine through the same harness and proxy, then SFT on them."""

    engine: str = Field("teacher", description="engine pool that demonstrates")
    tasks: str
    rollouts_per_task: int = Field(1, ge=1)
    sft: SftConfig = SftConfig()


class TrainingConfig(FrozenContract):
    """The algorithm, by veRL's registered names, and the optimizer."""

    iterations: int = Field(ge=0, description="reinforcement-learning iterations, the warm start not counted")
    advantage: str = Field("grpo", description="a name in veRL's advantage-estimator registry")
    policy_loss: str = Field("vanilla", description="a name in veRL's policy-loss registry")
    learning_rate: float = Field(1e-6, gt=0)
    schedule: Literal["constant", "cosine"] = Field("constant", description="cosine: falls over `iterations` to a tenth, and stays there")
    weight_decay: float = Field(0.0, ge=0)
    clip_grad: float = Field(1.0, gt=0)
    clip_ratio: float = Field(0.2, gt=0)
    entropy_coeff: float = Field(0.0, ge=0)
    epochs: int = Field(1, ge=1, description="passes over a batch")
    mini_batch_size: int = Field(16, ge=1, description="rows an optimizer step")
    micro_batch_size: int = Field(16, ge=1, description="rows a forward pass")
    norm_advantage_by_std: bool = True
    train_on_truncated: bool = Field(True, description="truncated rollouts teach with the reward they got")


class EvaluationConfig(FrozenContract):
    """Which task splits are measured, when and how. The first and the last policy that RL sees are always measured."""

    splits: dict[Label, str] = Field(default_factory=dict, description="name of a split to a directory of tasks")
    modes: dict[Label, float] = Field(default_factory=lambda: {"sampled": 1.0, "greedy": 0.0}, description="name to temperature")
    rollouts_per_task: int = Field(1, ge=1)
    every: int = Field(0, ge=0, description="also after every so many iterations; 0: only first and last")


class RunConfig(FrozenContract):
    """One training experiment."""

    name: RunName
    description: str = ""
    seed: int = 0
    policy: PolicyConfig
    tasks: str = Field(description="directory whose sub-directories are the training tasks, in Harbor's format")
    harness: HarnessConfig = HarnessConfig()
    sandbox: SandboxConfig = SandboxConfig()
    rollout: RolloutConfig = RolloutConfig()
    warm_start: WarmStartConfig | None = None
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _contains_something_to_do(self) -> "RunConfig":
        if self.training.iterations == 0 and self.warm_start is None and not self.evaluation.splits:
            raise ValueError("training.iterations is 0 and there is neither a warm_start nor an evaluation split: nothing to do")
        return self
