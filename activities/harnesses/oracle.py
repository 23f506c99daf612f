"""The task's own solution in place of an agent: shows that a task can be solved. It calls no model."""

from pathlib import Path

from activities.harnesses.base import Harness, HarnessContext, HarnessOptions
from contracts.failures import Cause, RolloutError


class Oracle(Harness):
    """Runs `solution/solve.sh` of the task."""

    name = "oracle"
    Options = HarnessOptions
    uses_model = False

    def __init__(self, options: HarnessOptions) -> None:
        self._options = options

    def version(self) -> str:
        return "1"

    def files(self, context: HarnessContext) -> dict[str, bytes | Path]:
        if context.solution is None:
            raise RolloutError(Cause.HARNESS_INSTALL, "the task has no solution/solve.sh for the oracle to run")
        return {"/solution": context.solution}

    def command(self, context: HarnessContext) -> list[str]:
        return ["bash", "/solution/solve.sh"]
