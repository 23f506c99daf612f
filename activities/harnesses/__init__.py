"""Harnesses: the agents that are trained, as they are deployed. One adapter a file, registered here."""

from pydantic import ValidationError

from activities.harnesses.base import Harness
from activities.harnesses.codex import Codex
from activities.harnesses.command import Command
from activities.harnesses.oracle import Oracle
from contracts.config import HarnessConfig

HARNESSES: dict[str, type[Codex] | type[Command] | type[Oracle]] = {adapter.name: adapter for adapter in (Codex, Command, Oracle)}


def get_harness(config: HarnessConfig) -> Harness:
    """The adapter that a config asks for. Raises ValueError naming what exists, or which option is wrong."""
    adapter = HARNESSES.get(config.name)
    if adapter is None:
        raise ValueError(f"unknown harness {config.name!r}; known: {', '.join(sorted(HARNESSES))}")
    try:
        options = adapter.Options.model_validate(config.options)
    except ValidationError as error:
        known = ", ".join(adapter.Options.model_fields) or "none"
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ValueError(f"harness {config.name!r}: {problems} (options: {known})") from error
    return adapter(options)  # type: ignore[arg-type]
