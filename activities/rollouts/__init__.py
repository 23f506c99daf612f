"""The activities of a rollout: each is thin over one service."""

from activities.rollouts.attempt import clean_up, provision, run_harness, score
from activities.rollouts.plan import plan_tasks, preflight

__all__ = ["clean_up", "plan_tasks", "preflight", "provision", "run_harness", "score"]
