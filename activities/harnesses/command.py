"""Any command line that reads OPENAI_BASE_URL and OPENAI_API_KEY, for agents without an adapter of their own."""

from pathlib import Path

from pydantic import Field

from activities.harnesses.base import Harness, HarnessContext, HarnessOptions
from contracts.failures import Cause, RolloutError


class CommandOptions(HarnessOptions):
    """Options of the `command` harness."""

    run: str = Field(description="shell command; the instruction is in $INSTRUCTION and in the file $INSTRUCTION_FILE")
    files: dict[str, str] = Field(default_factory=dict, description="absolute sandbox path to host file or directory, read-only")
    env: dict[str, str] = Field(default_factory=dict, description="further environment variables; no secrets: they are recorded")


class Command(Harness):
    """`bash -c RUN` in the task's working directory."""

    name = "command"
    Options = CommandOptions

    def __init__(self, options: CommandOptions) -> None:
        self._options = options

    def version(self) -> str:
        return "1"

    def read_only(self) -> dict[str, Path]:
        for path in self._options.files.values():
            if not Path(path).exists():
                raise RolloutError(Cause.HARNESS_INSTALL, f"harness.options.files: {path} does not exist")
        return {inside: Path(path).resolve() for inside, path in self._options.files.items()}

    def files(self, context: HarnessContext) -> dict[str, bytes | Path]:
        return {f"{context.home}/instruction.md": context.instruction.encode()}

    def env(self, context: HarnessContext) -> dict[str, str]:
        return {
            **self._options.env,
            "OPENAI_BASE_URL": f"{context.base_url}/v1",
            "OPENAI_API_KEY": context.api_key.get_secret_value(),
            "OPENAI_MODEL": context.model,
            "INSTRUCTION": context.instruction,
            "INSTRUCTION_FILE": f"{context.home}/instruction.md",
        }

    def command(self, context: HarnessContext) -> list[str]:
        return ["bash", "-c", self._options.run]
