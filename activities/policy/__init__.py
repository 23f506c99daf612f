"""The policy's weights: updates by the trainer, publication to the engines. Each is an activity over one service's API."""

from activities.policy.publish import publish_policy
from activities.policy.update import update_policy

__all__ = ["publish_policy", "update_policy"]
