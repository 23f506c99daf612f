"""Answers, token by token: what is shown of one that goes on is the beginning of the finished one."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from proxy.canonical import Message, assistant, extends
from proxy.rendering import Parsed, Rendering

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<>"), max_size=8)
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | WORDS, lambda inner: st.lists(inner, max_size=2), max_leaves=4)
CALLS = st.lists(st.tuples(st.sampled_from(["run", 'a"b']), st.dictionaries(WORDS, VALUES, max_size=2)), max_size=3)


class Model:
    """Rendering, and what a model that says a text would have sampled."""

    def __init__(self, directory: Path) -> None:
        self.rendering = Rendering(directory)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.prompt = self.rendering.prompt([{"role": "user", "content": "hi"}], [])

    def sample(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def parse(self, text: str) -> Parsed:
        return self.rendering.parse(self.prompt, self.sample(text), [])

    def messages(self, text: str) -> list[Message]:
        """The message after each token, then the finished one."""
        ids = self.sample(text)
        shown = [self.rendering.partial(self.prompt, ids[:length], []) for length in range(1, len(ids) + 1)]
        return [message(parsed) for parsed in [*shown, self.rendering.parse(self.prompt, ids, [])]]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Model:
    return Model(tiny_model)


def message(parsed: Parsed) -> Message:
    return assistant(parsed.content, parsed.reasoning, [(str(index), *call) for index, call in enumerate(parsed.calls)])


def block(name: str, arguments: dict[str, object]) -> str:
    return f'\n<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


@given(st.none() | WORDS, WORDS, CALLS)
def test_an_answer_only_grows(model: Model, thought: str | None, text: str, calls: list[tuple[str, dict[str, object]]]) -> None:
    said = (f"<think>\n{thought}\n</think>\n\n" if thought is not None else "") + text + "".join(block(*call) for call in calls)
    messages = model.messages(said + "<|im_end|>")
    for earlier, later in zip(messages, messages[1:], strict=False):
        assert extends(later, earlier), (earlier, later)
    made = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in messages[-1].get("tool_calls", [])]
    assert made == calls


def test_arguments_are_shown_while_they_are_sampled(model: Model) -> None:
    messages = model.messages(block("run", {"cmd": "grep -n port services.txt"}) + "<|im_end|>")
    shown = {call["function"]["arguments"] for message in messages for call in message.get("tool_calls", [])}
    assert len(shown) > 5
    assert '{"cmd": "grep' in shown


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ('{"name": "run", "arguments": {"cmd":  "a"}}', '{"cmd":  "a"}'),
        ('{"name": "run", "arguments": {"cmd": "say "hi""}}', '{"cmd": "say "hi""}}'),
        ('{"name": "run", "arguments": {"cmd": "a"', '{"cmd": "a"'),
        ('{"arguments": {"cmd": "a"}, "name": "run"}', '{"cmd": "a"}'),
        ('{"name": "run"}', "{}"),
    ],
)
def test_arguments_are_given_as_the_model_wrote_them(model: Model, said: str, arguments: str) -> None:
    assert model.parse(f"<tool_call>\n{said}\n</tool_call><|im_end|>").calls == [("run", arguments)]


def test_a_call_that_was_cut_off_has_the_arguments_so_far(model: Model) -> None:
    assert model.parse('<tool_call>\n{"name": "run", "arguments": {"cmd": "a').calls == [("run", '{"cmd": "a')]


@pytest.mark.parametrize(
    "said", ['{"nam', '{"name": 3, "arguments": {}}', '{"name": "", "arguments": {}}', "run(a)", '{"name": "a\tb", "arguments": {}}']
)
def test_a_call_without_a_name_is_text(model: Model, said: str) -> None:
    parsed = model.parse(f"<tool_call>\n{said}\n</tool_call><|im_end|>")
    assert (parsed.calls, parsed.content) == ([], said)


def test_brackets_without_end_are_text(model: Model) -> None:
    assert "[" * 9000 in model.parse("<tool_call>\n" + "[" * 9000 + "\n</tool_call><|im_end|>").content
