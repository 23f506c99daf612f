"""Recipes: a run's configuration as a person writes it, and what the local stack needs to carry it out.

A recipe is a YAML file with the keys of `contracts.config.RunConfig` and optionally `stack`. In its strings `{home}` is the local
stack's directory, `{recipe}` the recipe's own, `{seed}` the seed, `{base}` and `{trainer}` the Python interpreters of those
environments, `{port}` the port that an engine is to listen on. Relative paths are relative to the recipe's file.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from cli.problems import UserError, explain
from contracts.base import FrozenContract
from contracts.config import RunConfig


class PrepareConfig(FrozenContract):
    """A command that makes what the recipe needs, run once: when the path `creates` does not exist."""

    creates: str
    command: list[str] = Field(min_length=1)


class EngineConfig(FrozenContract):
    """An engine beside the policy's, with vLLM's token interface: a command that listens on `{port}`."""

    command: list[str] = Field(min_length=1)


class VllmConfig(FrozenContract):
    """How the local stack starts vLLM."""

    max_num_seqs: int = Field(64, ge=1)
    dtype: str = "float32"
    kv_cache_gib: int = Field(1, ge=1, description="on the CPU")
    arguments: list[str] = Field(default_factory=list, description="further arguments of the server")


class StackConfig(FrozenContract):
    """What the local stack needs beside the run's configuration."""

    prepare: PrepareConfig | None = None
    engines: dict[str, EngineConfig] = Field(default_factory=dict)
    vllm: VllmConfig = VllmConfig()


class _Recipe(RunConfig):
    stack: StackConfig = StackConfig()


@dataclass(frozen=True)
class Recipe:
    """A recipe, its placeholders filled and its paths absolute."""

    path: Path
    config: RunConfig
    stack: StackConfig


def interpreter(environment: str) -> Path:
    """Python of one of the three environments: beside this one, or where OPENFORGE_<ENVIRONMENT>_PYTHON says."""
    if environment == "base":
        return Path(sys.executable)
    named = os.environ.get(f"OPENFORGE_{environment.upper()}_PYTHON")
    return Path(named) if named else Path(sys.prefix).parent / environment / "bin" / "python"


def load_recipe(
    path: Path, home: Path, *, name: str | None = None, seed: int | None = None, changes: Mapping[str, Any] | None = None
) -> Recipe:
    """Read a recipe. `changes` are dotted keys with values. Raises UserError."""
    if path.is_dir():
        path = path / "recipe.yaml"
    if not path.is_file():
        raise UserError(f"there is no recipe {path}")
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a mapping of keys, such as 'name: …'")
    for key, value in {**({"name": name} if name else {}), **({"seed": seed} if seed is not None else {}), **(changes or {})}.items():
        _set(content, key.split("."), value)
    places = {
        "home": str(home.absolute()),
        "recipe": str(path.parent.absolute()),
        "seed": str(content.get("seed", 0)),
        "base": str(interpreter("base")),
        "trainer": str(interpreter("trainer")),
    }
    try:
        recipe = _Recipe.model_validate(_fill(content, places, path))
    except ValidationError as error:
        raise explain(error, _Recipe, str(path)) from error
    values = recipe.model_dump(exclude={"stack"})
    for keys in (
        ("policy", "model"),
        ("tasks",),
        ("warm_start", "tasks"),
        *(("evaluation", "splits", name) for name in recipe.evaluation.splits),
    ):
        _absolute(values, keys, path.parent)
    return Recipe(path.absolute(), RunConfig.model_validate(values), recipe.stack)


def parse_changes(settings: list[str]) -> dict[str, Any]:
    """`key.path=value` arguments, the value read as YAML. Raises UserError."""
    changes: dict[str, Any] = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator or not key:
            raise UserError(f"--set {setting}: expected KEY.PATH=VALUE, such as training.iterations=4")
        try:
            changes[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"--set {setting}: {value!r} is not a YAML value") from error
    return changes


def _set(content: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        content = content.setdefault(key, {})
        if not isinstance(content, dict):
            raise UserError(f"{'.'.join(keys)}: {key} is not a table")
    content[keys[-1]] = value


def _fill(value: Any, places: Mapping[str, str], path: Path) -> Any:
    if isinstance(value, dict):
        return {key: _fill(item, places, path) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, places, path) for item in value]
    if not isinstance(value, str):
        return value
    for found in re.findall(r"\{([a-z_]+)\}", value):
        if found not in places and found != "port":
            raise UserError(f"{path}: {value!r}: unknown placeholder {{{found}}}; known: {', '.join(sorted([*places, 'port']))}")
    return re.sub(r"\{([a-z_]+)\}", lambda match: places.get(match[1], match[0]), value)


def _absolute(values: dict[str, Any], keys: tuple[str, ...], base: Path) -> None:
    for key in keys[:-1]:
        if values.get(key) is None:
            return
        values = values[key]
    values[keys[-1]] = str((base / values[keys[-1]]).absolute())
