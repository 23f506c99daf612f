"""A small tokenizer, made on the spot: lossless on any text, and short on what Codex sends.

A word-level BPE needs 690 tokens for Codex's first request, too many for so small a policy on a CPU. So the lines of that request that
never change (the tools, the chat template's sentences, the frame of a tool's output) become one token each. Text that differs from
them falls back to BPE: longer, still exact. A real policy needs none of this.
"""

import json
import re
from typing import Any

from lookup import FIRST, KINDS, PEOPLE, ROOMS, SECOND, TEAMS, WORDINGS, Lookup
from renderers.qwen3 import _TOOLS_FOOTER, _TOOLS_HEADER
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ENDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# whole: an option with its value (` -d=`, ` -f2`), a file's name, a word with its space; digits one by one
PIECES = r" -[a-z]=?[0-9]?| ?[A-Za-z]+\.txt| ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s+"
CALL = ('{"name": "exec_command", "arguments": {"cmd": "', '"}}')


def constant_texts(instructions: str, captured: dict[str, Any]) -> list[str]:
    """Texts that are the same in every conversation, longest first."""
    texts = [f"system\n{instructions}\n\n", _TOOLS_HEADER, _TOOLS_FOOTER, *CALL]
    texts += ["\n" + json.dumps(tool, ensure_ascii=False) for tool in captured["tools"]]
    output = next(message["content"] for message in captured["messages"] if message["role"] == "tool")
    # "Chunk ID: 8c03c9\nWall time: 0.0000 seconds\nProcess exited with code 0\n…": what stands between the numbers
    texts += [piece for piece in re.split(r"(?<=Chunk ID: )[0-9a-f]+|\d+(?:\.\d+)?", output) if len(piece) > 8]
    return sorted(set(texts), key=len, reverse=True)


def make_tokenizer(tasks: list[Lookup], instructions: str, captured: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Train it on the words of the tasks, never on their answers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    words = [*FIRST, *SECOND, *PEOPLE, *ROOMS, *TEAMS, *(column for kind in KINDS for column in kind.columns)]
    corpus = [task.instruction for task in tasks] + [task.command for task in tasks]
    corpus += [f"{word} {word}" for word in words] + [instructions, "assistant\nuser\n", "Done.", "The answer is in `answer.txt`."]
    corpus += [wording.format(file=kind.file, column=column, name="x") for wording in WORDINGS for kind in KINDS for column in kind.columns]
    tokenizer.train_from_iterator(
        corpus * 4,
        trainers.BpeTrainer(
            vocab_size=1000,
            min_frequency=2,
            special_tokens=list(ENDS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in (*MARKS, *constant_texts(instructions, captured))])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
