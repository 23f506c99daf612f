"""The quickstart: tasks that are sound, a tokenizer that loses nothing, a teacher that is as often right as it says."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from capture import capture
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from lookup import QUESTIONS, lookups, split_names, write_task
from prepare import INSTRUCTIONS
from teacher import MISTAKES, RIGHT, answer, choose, create_app, understand
from tokenizer import make_tokenizer
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from activities.harnesses.codex import CodexOptions
from activities.tasks import load_task
from cli.main import app
from cli.recipes import load_recipe
from proxy.rendering import Rendering
from tests.support.processes import ROOT

TASKS = lookups("train", 40, 0)


@pytest.fixture(scope="module")
def captured() -> dict[str, Any]:
    task = TASKS[0]
    return capture(CodexOptions(instructions=INSTRUCTIONS), task.instruction, {task.kind.file: task.content}, task.command)


@pytest.fixture(scope="module")
def tokenizer(captured: dict[str, Any]) -> PreTrainedTokenizerFast:
    return make_tokenizer(lookups("demonstrations", 100, 0) + TASKS, INSTRUCTIONS, captured)


def test_the_recipe_loads_with_the_harness_that_the_tokenizer_is_made_for(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes/quickstart", tmp_path, seed=3)
    assert recipe.config.harness.options["instructions"] == INSTRUCTIONS
    assert recipe.config.policy.model == f"{tmp_path}/quickstart/seed-3/model"


@pytest.mark.parametrize("seed", [0, 1])
def test_no_name_is_in_two_splits(seed: int) -> None:
    names = [set(split) for split in split_names(seed).values()]
    assert sum(map(len, names)) == len(set.union(*names))


def test_tasks_differ_and_ask_all_questions() -> None:
    tasks = [task for split in ("demonstrations", "train", "held_out") for task in lookups(split, 64, 0)]
    assert len({task.instruction for task in tasks}) == len(tasks)
    assert {(task.kind, task.column) for task in tasks} == set(QUESTIONS)
    assert lookups("train", 64, 0) == lookups("train", 64, 0)
    assert lookups("train", 64, 0) != lookups("train", 64, 1)


def test_the_answer_is_in_the_file_and_nowhere_else(tmp_path: Path) -> None:
    for task in TASKS:
        write_task(task, tmp_path / task.id)
        loaded = load_task(tmp_path / task.id)
        assert loaded.warnings == ()
        assert f"={task.answer}" in task.content
        assert task.answer not in loaded.instruction.replace(task.name, "")
        assert task.answer not in task.command.replace(task.name, "").replace(task.kind.file, "") or len(task.answer) < 3


def test_the_solution_is_rewarded_and_doing_nothing_is_not(tmp_path: Path) -> None:
    for task in TASKS[:7]:
        write_task(task, tmp_path / task.id)
    done = CliRunner().invoke(app, ["tasks", "validate", str(tmp_path), "--oracle", "--json"])
    found = json.loads(done.stdout)
    assert [(entry["oracle"], entry["nothing"]) for entry in found] == [(1.0, 0.0)] * 7, done.stdout


@given(st.text())
def test_the_tokenizer_loses_nothing(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_codexs_request_is_short_in_it(tokenizer: PreTrainedTokenizerFast, captured: dict[str, Any], tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    rendering = Rendering(tmp_path, {"name": "qwen3"})
    question, whole = captured["messages"][:2], captured["messages"]
    first = rendering.prompt(question, captured["tools"])
    assert len(first) < 60
    assert len(rendering.prompt(whole, captured["tools"])) < 130
    assert "exec_command" in tokenizer.decode(first)


def test_the_teacher_understands_every_wording_and_nothing_else() -> None:
    for task in TASKS:
        assert understand(task.instruction) == (task.kind, task.column, task.name)
    with pytest.raises(ValueError, match="does not know what to do"):
        understand("Write a poem.")


def test_the_teacher_is_right_as_often_as_it_says() -> None:
    draw = random.Random(0)
    right = Counter(choose(task.instruction, draw)[0] == task.command for task in TASKS * 100)
    assert abs(right[True] / right.total() - RIGHT) < 0.03
    missing = sum(choose(task.instruction, draw)[0] == task.command.removesuffix(" > answer.txt") for task in TASKS * 100)
    assert abs(missing / (100 * len(TASKS)) - (1 - RIGHT) * MISTAKES["no redirect"]) < 0.03


def test_the_teacher_ends_after_it_has_seen_the_output() -> None:
    prompt = "<|im_start|>user\nx<|im_end|>\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert answer(prompt, random.Random(0)) == ("Done.", 0.0)


def test_the_teacher_speaks_the_engines_interface(tokenizer: PreTrainedTokenizerFast) -> None:
    client = TestClient(create_app(tokenizer, 512))
    prompt = f"<|im_start|>user\n{TASKS[0].instruction}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    body = {"token_ids": ids, "sampling_params": {"max_tokens": 100}, "request_id": "r", "stream": True}
    text = client.post("/inference/v1/generate", json=body).text
    choice = json.loads(text.split("\n")[0].removeprefix("data: "))["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    assert choice["weight_versions"] == [{"version": "teacher@0", "start": 0, "end": len(choice["token_ids"])}]
    assert "exec_command" in tokenizer.decode(choice["token_ids"])
    assert text.endswith("data: [DONE]\n\n")
    assert client.post("/inference/v1/generate", json=body).text == text
