"""Text that differs between two runs of the same commands and means nothing: which differences a replay may overlook.

A rule is a pattern that matches the volatile text alone, with what is around it as look-behind and look-ahead. Two texts are alike if they
are equal once every match is replaced by its rule's name, so the rest, and the order and kind of what is overlooked, must be equal. Numbers
are never masked in general: 10 against 11 tests that pass is a different world. Lines are never sorted: their order can be the difference.

A harness that writes something of its own differently each time has a `HarnessRules` here; `docs/proxy.md` says what was measured.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from contracts.sessions import ReplayLevel
from proxy.canonical import Message, message_key


@dataclass(frozen=True)
class Rule:
    """`names`: whether the text names something that a later command could refer to. A duration names nothing."""

    pattern: str
    names: bool = True


@dataclass(frozen=True)
class Likeness:
    """Two texts or messages are alike. `stale` are the names in the recorded one that are others in the new one."""

    level: ReplayLevel
    stale: tuple[str, ...] = ()


class Masks:
    """Rules that are applied together; where two match, the earlier one in the list counts."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._pattern = re.compile("|".join(f"(?P<r{number}>{rule.pattern})" for number, rule in enumerate(rules)), re.MULTILINE)

    def stale(self, recorded: str, new: str) -> tuple[str, ...] | None:
        """Names that differ between two texts that are alike; none if they are not."""
        if recorded == new:
            return ()
        if not self._rules or self._masked(recorded) != self._masked(new):
            return None
        pairs = zip(self._pattern.finditer(recorded), self._pattern.finditer(new), strict=True)
        return tuple(old[0] for old, now in pairs if old[0] != now[0] and self._rule(old).names)

    def _masked(self, text: str) -> str:
        return self._pattern.sub(lambda match: f"\0{match.lastgroup}\0", text)

    def _rule(self, match: re.Match[str]) -> Rule:
        return self._rules[int((match.lastgroup or "")[1:])]


_MONTH: Final = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_DAY: Final = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_UUID: Final = r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
_SHORT_HASH: Final = r"(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,12}"

# What commands print differently each time, in tool output alone.
_OUTPUT: Final = [
    Rule(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|\ ?[+-]\d\d:?\d\d)?"),
    Rule(rf"\b{_DAY}\ {_MONTH}\ {{1,2}}\d{{1,2}}\ \d\d:\d\d:\d\d\ (?:(?:[AP]M\ )?[A-Z]{{2,5}}\ \d{{4}}|\d{{4}}(?:\ [+-]\d{{4}})?)"),
    Rule(rf"\b{_MONTH}\ {{1,2}}\d{{1,2}}\ (?:\d\d:\d\d(?::\d\d)?|\ \d{{4}})(?=\ )"),  # ls -l
    Rule(r"\b\d+m\d+(?:[.,]\d+)?s\b", names=False),  # bash's time
    Rule(r"\b\d+[.,]\d+(?=user |system )|\b\d+:\d\d[.,]\d+(?=elapsed)|\b\d+(?=%CPU|avgtext|avgdata|maxresident)", names=False),  # GNU time
    Rule(r"\b\d+(?=inputs|outputs|major|minor|pagefaults|swaps)", names=False),
    Rule(r"\b\d+(?:\.\d+)?(?:ns|µs|us|ms|s)\b|\b\d+(?:\.\d+)?(?= (?:seconds|second|secs|sec)\b)", names=False),
    Rule(r"(?<=/)tmp\.[A-Za-z0-9]{6,}|(?<=/)tmp[a-z0-9_]{8}\b"),  # mktemp, Python's tempfile
    Rule(r"\b0x[0-9a-f]{6,16}\b"),
    Rule(_UUID),
    # Hashes of commits hold their date; those of contents (blob, tree, sha1sum) do not, and differ for a reason.
    Rule(r"(?<!blob )(?<!tree )\b[0-9a-f]{40}\b(?!\ [ *])"),
    Rule(rf"^{_SHORT_HASH}(?=\ \S)|(?<=\ ){_SHORT_HASH}(?=\]\ )|(?<=HEAD is now at ){_SHORT_HASH}\b"),
    Rule(r"(?<=^Updating )[0-9a-f]{7,12}\.\.[0-9a-f]{7,12}$"),
]


@dataclass(frozen=True)
class HarnessRules:
    """What one harness writes differently each time. `json_output`: its tool output is a JSON object, whose strings are compared."""

    prompt: tuple[Rule, ...] = ()
    output: tuple[Rule, ...] = ()
    json_output: bool = False

    @cached_property
    def _prompt_masks(self) -> Masks:
        return Masks(self.prompt)

    @cached_property
    def _output_masks(self) -> list[tuple[ReplayLevel, Masks]]:
        return [(ReplayLevel.HARNESS, Masks(self.output)), (ReplayLevel.OUTPUT, Masks([*self.output, *_OUTPUT]))]

    def compare(self, recorded: Message, new: Message) -> Likeness | None:
        """How alike two messages are; none if a replay may not overlook what differs."""
        if recorded == new or message_key(recorded) == message_key(new):
            return Likeness(ReplayLevel.EQUAL)
        role = recorded["role"]
        if role != new["role"] or role not in ("system", "user", "tool"):
            return None
        old, now = recorded["content"], new["content"]
        if role != "tool":
            stale = self._prompt_masks.stale(old, now)
            return None if stale is None else Likeness(ReplayLevel.HARNESS, stale)
        if message_key({**recorded, "content": ""}) != message_key({**new, "content": ""}):  # the answer to another call
            return None
        if self.json_output:
            old, now = _decoded(old), _decoded(now)
        for level, masks in self._output_masks:
            if (stale := masks.stale(old, now)) is not None:
                return Likeness(level, stale)
        return None


def _decoded(text: str) -> str:
    """The strings of a JSON object as they were printed, so that patterns see its lines; any other text as it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, dict):
        return text
    return "\n".join(f"{key}:\n{part if isinstance(part, str) else json.dumps(part)}" for key, part in sorted(value.items()))


_NONE: Final = HarnessRules()
_RULES: Final = {
    "codex": HarnessRules(
        prompt=(
            Rule(r"(?<=<cwd>)[^<]*(?=</cwd>)|(?<=<root>)[^<]*(?=</root>)"),
            Rule(r"(?<=<current_date>)[^<]*(?=</current_date>)|(?<=<timezone>)[^<]*(?=</timezone>)"),
        ),
        output=(
            Rule(r"(?<=^Chunk ID: )[0-9a-f]{6}$", names=False),
            Rule(r"(?<=^Wall time: )\d+(?:\.\d+)?(?= seconds$)", names=False),
            Rule(r"(?<=^Original token count: )\d+$", names=False),
            Rule(r"(?<=^Process running with session ID )\d+$"),
        ),
    ),
    "pi": HarnessRules(
        prompt=(Rule(r"(?<=<cwd>)[^<]*(?=</cwd>)"),),
        output=(Rule(r"(?<=Full output: )[^\s\]]+"),),
    ),
    "mini-swe-agent": HarnessRules(
        prompt=(Rule(r"(?<=<system_information>)[^<]*(?=</system_information>)", names=False),),
        json_output=True,
    ),
    "openclaw": HarnessRules(
        prompt=(
            Rule(rf"^\[{_DAY} \d{{4}}-\d\d-\d\d \d\d:\d\d [A-Z]{{2,5}}\](?= )"),
            Rule(rf"(?<=session=agent:main:explicit:){_UUID}|(?<=sessionId=)[\w-]+"),
            Rule(r"(?<=\bhost=)[^\s|,]+|(?<=\bos=)[^|,\n]+|(?<=Current date: )[^\n]+"),
        ),
    ),
    "claude-code": HarnessRules(
        prompt=(  # lengths of paths are bounded because the patterns would be tried from each slash of a long line
            Rule(r"(?<=Today's date is )\d{4}-\d\d-\d\d|(?<=Today's date: )\d{4}-\d\d-\d\d|(?<=OS Version: )[^\n]+"),
            Rule(r"(?<=[ `\"'])/[^\s`\"']{0,200}/\.claude/projects/[^\s`\"']{0,200}/memory\b"),
        ),
        output=(
            Rule(r"/[^\s`\"']{0,200}/tool-results/[^\s`\"'/]+"),
            Rule(r"/[^\s`\"']{0,200}/tasks/[^\s`\"'/]{1,100}\.output\b|(?<=running in background with ID: )\w+"),
        ),
    ),
}


def rules_of(harness: str) -> HarnessRules:
    """The rules of a harness; one that is not listed writes nothing differently."""
    return _RULES.get(harness, _NONE)
