"""Rewards: what a task's verifier says about the state that the agent left behind."""

from activities.rewards.verifier import verify

__all__ = ["verify"]
