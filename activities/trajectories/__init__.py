"""Trajectories: recorded calls into rows, rows into Parquet files, files into a sealed batch; and reading them again."""

from activities.trajectories.record import record_trajectory
from activities.trajectories.seal import seal_batch

__all__ = ["record_trajectory", "seal_batch"]
