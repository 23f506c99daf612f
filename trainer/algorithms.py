"""Advantages and losses by veRL's registered names.

Advantages are estimated over rollouts, not over rows: a rollout counts once in its group's baseline however many segments its context
was cut into. Its sampled tokens, over all segments in order, are one response to the estimator; the result is handed back to the
segments token by token.
"""

from typing import Any

import numpy as np
import torch

from contracts.config import TrainingConfig
from trainer.batches import Batch, BatchError

# What these need is not in a trajectory: a critic's values, a greedy rollout's reward, the policy's full distribution, reward dimensions.
_NEED_MORE = {"gae", "remax", "optimal_token_baseline", "tir_optimal_token_baseline", "gdpo"}
# These need settings of their own, which a run's config does not have.
_NEED_SETTINGS = {"bypass_mode", "dro"}
_COMPARE_IN_GROUPS = {
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "gpg",
    "opo",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus_baseline",
}


def check(config: TrainingConfig) -> None:
    """Raise BatchError for a name that veRL does not have, or that trajectories cannot feed."""
    from verl.trainer.ppo import core_algos

    estimators = sorted(set(map(_name, core_algos.ADV_ESTIMATOR_REGISTRY)) - _NEED_MORE)
    if config.advantage not in estimators:
        raise BatchError(f"training.advantage is {config.advantage!r}; allowed: {', '.join(estimators)}")
    losses = sorted(set(core_algos.POLICY_LOSS_REGISTRY) - _NEED_SETTINGS)
    if config.policy_loss not in losses:
        raise BatchError(f"training.policy_loss is {config.policy_loss!r}; allowed: {', '.join(losses)}")


def min_group(config: TrainingConfig) -> int:
    """Rollouts that a group needs for its baseline to exist."""
    return 2 if config.advantage in _COMPARE_IN_GROUPS else 1


def advantages(batch: Batch, config: TrainingConfig) -> list[list[float]]:
    """For every row, one advantage a response token; 0 where the policy did not sample."""
    from verl.protocol import DataProto
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.ray_trainer import compute_advantage

    lengths = [0] * len(batch.rollouts)
    for row in batch.rows:
        lengths[row.rollout] += row.sampled
    shape = (len(lengths), max(lengths))
    mask = torch.zeros(shape)
    rewards = torch.zeros(shape)
    for place, (rollout, length) in enumerate(zip(batch.rollouts, lengths, strict=True)):
        mask[place, :length] = 1
        rewards[place, length - 1] = rollout.reward
    data = DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": mask},
        non_tensors={"uid": np.array([str(rollout.group) for rollout in batch.rollouts], dtype=object)},
    )
    algorithm = AlgoConfig(adv_estimator=config.advantage, norm_adv_by_std_in_grpo=config.norm_advantage_by_std)
    data = compute_advantage(data, adv_estimator=config.advantage, norm_adv_by_std_in_grpo=config.norm_advantage_by_std, config=algorithm)
    values = data.batch["advantages"].tolist()
    used = [0] * len(lengths)
    result: list[list[float]] = []
    for row in batch.rows:
        tokens: list[float] = []
        for sampled in row.mask:
            tokens.append(values[row.rollout][used[row.rollout]] if sampled else 0.0)
            used[row.rollout] += sampled
        result.append(tokens)
    return result


def _name(key: Any) -> str:
    return str(getattr(key, "value", key))
