"""Tasks in Harbor's format: reading, checking, and what of their environment a local sandbox can carry out."""

from activities.tasks.environment import prepare
from activities.tasks.harbor import Task, TaskError, list_tasks, load_task

__all__ = ["Task", "TaskError", "list_tasks", "load_task", "prepare"]
