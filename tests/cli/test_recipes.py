"""Recipes: what a person gets wrong is told by key, value and what is allowed."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.problems import UserError
from cli.recipes import load_recipe, parse_changes

GOOD: dict[str, Any] = {
    "name": "mine",
    "policy": {"model": "{home}/model-{seed}"},
    "tasks": "tasks",
    "training": {"iterations": 2},
    "evaluation": {"splits": {"held_out": "/held"}},
}


def write(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_placeholders_are_filled_and_paths_are_absolute(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, GOOD), Path("/home-of-stack"), seed=7)
    assert recipe.config.policy.model == "/home-of-stack/model-7"
    assert recipe.config.tasks == str(tmp_path / "tasks")
    assert recipe.config.evaluation.splits == {"held_out": "/held"}


def test_values_are_changed_from_the_command_line(tmp_path: Path) -> None:
    changes = parse_changes(["training.iterations=5", "rollout.sampling.temperature=0.5", "evaluation.splits={}"])
    config = load_recipe(write(tmp_path, GOOD), tmp_path, name="other", changes=changes).config
    assert (config.name, config.training.iterations, config.rollout.sampling.temperature) == ("other", 5, 0.5)
    assert config.evaluation.splits == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: [", "is not valid YAML"),
        ("- a\n", "must hold a mapping"),
        ({**GOOD, "trainig": {}}, r"trainig: unknown key; did you mean 'training'\? \(known here: .*policy"),
        ({**GOOD, "training": {"iterations": 2, "lr": 1}}, r"training\.lr: unknown key .*known here: .*learning_rate"),
        ({**GOOD, "training": {"iterations": "many"}}, r"training\.iterations: .*valid integer.* \(it is 'many'\)"),
        ({**GOOD, "training": {"iterations": -1}}, r"training\.iterations: .*greater than or equal to 0 \(it is -1\)"),
        ({**GOOD, "name": "My Run"}, r"name: .*pattern.* \(it is 'My Run'\)"),
        ({**GOOD, "policy": {}}, r"policy\.model: missing"),
        ({**GOOD, "training": {"iterations": 0}, "evaluation": {}}, "nothing to do"),
        ({**GOOD, "tasks": "{hme}/tasks"}, r"unknown placeholder \{hme\}; known: base, home"),
        ({**GOOD, "stack": {"vllm": {"max_seqs": 1}}}, r"stack\.vllm\.max_seqs: unknown key; did you mean 'max_num_seqs'\?"),
        ({**GOOD, "evaluation": {"splits": {"Held Out": "/x"}}}, r"evaluation\.splits"),
    ],
)
def test_a_mistake_is_explained(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe(write(tmp_path, content), tmp_path)


def test_a_recipe_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no recipe"):
        load_recipe(tmp_path / "nothing.yaml", tmp_path)


@pytest.mark.parametrize("setting", ["iterations", "=3"])
def test_a_change_without_a_key_or_a_value_is_refused(setting: str) -> None:
    with pytest.raises(UserError, match=r"expected KEY\.PATH=VALUE"):
        parse_changes([setting])
