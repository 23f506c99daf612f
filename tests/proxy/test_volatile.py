"""Which differences a replay may overlook, and which it must not."""

import json

import pytest

from contracts.sessions import ReplayLevel
from proxy.canonical import Message
from proxy.volatile import rules_of


def output(text: str, call: str = "call1") -> Message:
    return {"role": "tool", "tool_call_id": call, "content": text}


def level(harness: str, recorded: Message, new: Message) -> ReplayLevel | None:
    likeness = rules_of(harness).compare(recorded, new)
    return likeness.level if likeness else None


CODEX = "Chunk ID: {0}\nWall time: {1} seconds\nProcess exited with code 0\nOriginal token count: {2}\nOutput:\n7 files\n"
BLOB = "3b18e512dba79e4c8300dd08aeb37f8e728b8dad"
COMMIT = "a94a8fe5ccb19ba61c4c0873d391e987982fbbd3"


@pytest.mark.parametrize(
    ("harness", "recorded", "new"),
    [
        ("codex", CODEX.format("a1b2c3", "0.0512", 12), CODEX.format("0f0f0f", "1.2", 13)),
        ("codex", "Process running with session ID 4711\n", "Process running with session ID 52\n"),
        ("pi", "[Full output: /tmp/pi-bash-1a.log]", "[Full output: /tmp/pi-bash-9f.log]"),
        ("claude-code", "saved to /home/a/x/tool-results/b1.txt", "saved to /home/a/x/tool-results/c2.txt"),
        ("mini-swe-agent", json.dumps({"output": "a\n", "returncode": 0}), json.dumps({"returncode": 0, "output": "a\n"}, indent=1)),
    ],
)
def test_what_a_harness_adds_to_tool_output_is_overlooked(harness: str, recorded: str, new: str) -> None:
    assert level(harness, output(recorded), output(new)) is ReplayLevel.HARNESS
    assert level("other", output(recorded), output(new)) is None


@pytest.mark.parametrize(
    ("harness", "recorded", "new"),
    [
        ("codex", "<cwd>/app</cwd><current_date>2026-12-01</current_date>", "<cwd>/w</cwd><current_date>2026-12-02</current_date>"),
        ("pi", "<cwd>/a</cwd>", "<cwd>/b</cwd>"),
        (
            "mini-swe-agent",
            "<system_information>\nLinux 6.1\n</system_information>",
            "<system_information>\nLinux 6.2\n</system_information>",
        ),
        ("openclaw", "[Tue 2026-12-01 04:54 UTC] Go.", "[Wed 2026-12-02 10:01 UTC] Go."),
        ("openclaw", "host=a1 | os=Linux 6 | x", "host=b2 | os=Linux 7 | x"),
        ("claude-code", "Today's date is 2026-12-01.\nOS Version: Linux 6.1\n", "Today's date is 2026-12-02.\nOS Version: Linux 6.2\n"),
    ],
)
def test_what_a_harness_writes_into_the_prompt_is_overlooked(harness: str, recorded: str, new: str) -> None:
    for role in ("system", "user"):
        assert level(harness, {"role": role, "content": recorded}, {"role": role, "content": new}) is ReplayLevel.HARNESS
        assert level(harness, {"role": role, "content": recorded}, {"role": role, "content": new + "!"}) is None


@pytest.mark.parametrize(
    ("recorded", "new"),
    [
        ("real\t0m0.003s\nuser\t0m0.001s", "real\t0m1.200s\nuser\t0m0.010s"),
        ("0.00user 0.00system 0:00.01elapsed 12%CPU", "0.02user 0.01system 0:00.04elapsed 99%CPU"),
        ("at 2026-12-01T04:54:01.123Z", "at 2026-12-02T10:00:00Z"),
        ("Tue Dec  1 04:54:00 UTC 2026", "Wed Dec 12 14:04:09 UTC 2026"),
        ("Date:   Tue Dec 1 04:54:00 2026 +0000", "Date:   Wed Dec 2 04:54:00 2026 +0000"),
        ("-rw-r--r-- 1 root root 5 Dec  1 04:54 a.txt", "-rw-r--r-- 1 root root 5 Dec 12 14:04 a.txt"),
        ("3 passed in 0.03s", "3 passed in 1.25s"),
        ("took 1.5 seconds", "took 12 seconds"),
        ("/tmp/tmp.Ab12Cd34Ef/x", "/tmp/tmp.Zz99Yy88Xx/x"),
        ("/tmp/tmpab12_xyz", "/tmp/tmp00000000"),
        ("<object at 0x7f00a1b2c3d4>", "<object at 0x7f11a1b2c3d4>"),
        ("id 123e4567-e89b-12d3-a456-426614174000", "id 00000000-e89b-12d3-a456-426614174000"),
        (f"commit {COMMIT}", f"commit {COMMIT[::-1]}"),
        ("[main 1a2b3c4] fix", "[main 9f8e7d6] fix"),
        ("1a2b3c4 fix\n5d6e7f8 start", "9a8b7c6 fix\n1d2e3f4 start"),
    ],
)
def test_what_commands_print_differently_is_overlooked_in_tool_output_alone(recorded: str, new: str) -> None:
    assert level("other", output(recorded), output(new)) is ReplayLevel.OUTPUT
    assert level("other", {"role": "user", "content": recorded}, {"role": "user", "content": new}) is None


@pytest.mark.parametrize(
    ("recorded", "new"),
    [
        ("10 passed in 0.03s", "11 passed in 0.03s"),
        ("a\nb", "b\na"),
        ("done", "done "),
        ("a.txt", "a.txt\nb.txt"),
        ("-rw-r--r-- 1 root root 5 Dec  1 04:54 a.txt", "-rw-r--r-- 1 root root 6 Dec  1 04:54 a.txt"),
        (f"{BLOB}  a.txt", f"{BLOB[::-1]}  a.txt"),
        (f"100644 blob {BLOB}\ta.txt", f"100644 blob {BLOB[::-1]}\ta.txt"),
        ("index 1a2b3c4..5d6e7f8 100644", "index 1a2b3c4..9d6e7f8 100644"),
        ("index 0000000..5d6e7f8", "index 0000000..9d6e7f8"),
        ("1234567", "7654321"),
        ("Dec  1 04:54 now", "Dec  1 04:54"),
        ("at 2026-12-01T04:54:01Z", "at Tue Dec  1 04:54:01 UTC 2026"),
        ("Chunk ID: a1b2c3", "Chunk ID: d4e5f6"),
    ],
)
def test_what_may_matter_is_a_difference(recorded: str, new: str) -> None:
    assert level("other", output(recorded), output(new)) is None


def test_the_answer_to_another_call_is_a_difference() -> None:
    assert level("codex", output("x"), output("x", call="call2")) is None
    assert level("codex", output("x"), {"role": "user", "content": "x"}) is None


def test_only_names_that_changed_are_stale_and_durations_name_nothing() -> None:
    recorded = output("Wall time: 0.1 seconds\nProcess running with session ID 11\n/tmp/tmp.aaaaaaaa /tmp/tmp.same0000 3ms")
    new = output("Wall time: 0.2 seconds\nProcess running with session ID 22\n/tmp/tmp.bbbbbbbb /tmp/tmp.same0000 4ms")
    likeness = rules_of("codex").compare(recorded, new)
    assert likeness is not None
    assert likeness.stale == ("11", "tmp.aaaaaaaa")
