"""Temporal workflows: deterministic descriptions of a run, a rollout and an evaluation. They import contracts and nothing else of ours.

A change to a workflow that has running executions must replay their histories: `tests/workflows` replays recorded ones.
"""
