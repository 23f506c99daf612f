"""OpenAI Codex, the command-line agent, from its PyPI wheel."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import Field

from activities.harnesses.base import Harness, HarnessContext, HarnessOptions
from contracts.failures import Cause, RolloutError

PACKAGE = "openai-codex-cli-bin"
MOUNT = "/opt/codex"

Toml = dict[str, Any]

# Switches off what a rollout has no use for: Codex's first request shrinks from 24 KB to 4 KB, and only the tools that run
# commands remain.
LEAN: Toml = {
    "include_permissions_instructions": False,
    "include_environment_context": False,
    "include_collaboration_mode_instructions": False,
    "include_apps_instructions": False,
    "project_doc_max_bytes": 0,
    "web_search": "disabled",
    "allow_login_shell": False,
    "analytics": {"enabled": False},
    "skills": {"include_instructions": False, "bundled": {"enabled": False}},
    "tools": {"update_plan": {"enabled": False}, "experimental_request_user_input": {"enabled": False}},
    "features": {
        "multi_agent": False,
        "goals": False,
        "skill_search": False,
        "plugins": False,
        "apps": False,
        "remote_plugin": False,
        "view_image": False,
        "shell_snapshot": False,
        "unified_exec_tty": False,
    },
}


class CodexOptions(HarnessOptions):
    """Options of the `codex` harness."""

    lean: bool = Field(True, description="switch off plans, plug-ins, skills, web search and the long instructions")
    instructions: str | None = Field(None, description="system prompt in place of Codex's own")
    config: dict[str, Any] = Field(default_factory=dict, description="further keys of config.toml, as nested tables")


class Codex(Harness):
    """`codex exec`, unattended: the sandbox around it is ours, so its own is off."""

    name = "codex"
    Options = CodexOptions

    def __init__(self, options: CodexOptions) -> None:
        self._options = options

    def version(self) -> str:
        try:
            return metadata.version(PACKAGE)
        except metadata.PackageNotFoundError as error:
            raise RolloutError(Cause.HARNESS_INSTALL, f"codex is not installed: the package {PACKAGE} is missing") from error

    def read_only(self) -> dict[str, Path]:
        self.version()
        import codex_cli_bin

        return {MOUNT: codex_cli_bin.bundled_package_dir()}

    def files(self, context: HarnessContext) -> dict[str, bytes | Path]:
        config: Toml = {
            "model": context.model,
            "model_provider": "proxy",
            "model_context_window": context.max_context,
            "check_for_update_on_startup": False,
            "model_providers": {
                "proxy": {
                    "name": "proxy",
                    "base_url": f"{context.base_url}/v1",
                    "env_key": "PROXY_KEY",
                    "wire_api": "responses",
                    "request_max_retries": 10,  # the proxy hides the engine's troubles; these bridge its own restart
                    "stream_max_retries": 10,
                    "stream_idle_timeout_ms": 300_000,
                }
            },
        }
        files: dict[str, bytes | Path] = {}
        if self._options.instructions is not None:
            path = f"{context.home}/.codex/instructions.md"
            config["model_instructions_file"] = path
            files[path] = self._options.instructions.encode()
        if self._options.lean:
            _merge(config, LEAN)
        _merge(config, self._options.config)
        files[f"{context.home}/.codex/config.toml"] = to_toml(config).encode()
        return files

    def env(self, context: HarnessContext) -> dict[str, str]:
        # Five SQLite files of state, which an ephemeral session never reads again, are kept in memory: no disk is asked to sync them.
        state = {"CODEX_HOME": f"{context.home}/.codex", "CODEX_SQLITE_HOME": "/dev/shm"}  # noqa: S108 (the sandbox's own)
        return {**state, "PROXY_KEY": context.api_key.get_secret_value()}

    def command(self, context: HarnessContext) -> list[str]:
        return [
            f"{MOUNT}/bin/codex",
            "exec",
            "--json",
            "--skip-git-repo-check",
            "--ephemeral",
            "--dangerously-bypass-approvals-and-sandbox",
            "-C",
            context.workdir,
            context.instruction,
        ]


def _merge(into: Toml, more: Toml) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = json.loads(json.dumps(value))


def to_toml(table: Toml, prefix: str = "") -> str:
    """A TOML document: JSON strings, numbers, booleans and arrays of them are valid TOML values; tables nest."""
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            path = f"{prefix}{_key(key)}"
            lines += ["", f"[{path}]", to_toml(value, f"{path}.")]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if key.replace("_", "a").replace("-", "a").isalnum() and key.isascii() else _value(key)


def _value(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one character that TOML escapes and JSON does not
