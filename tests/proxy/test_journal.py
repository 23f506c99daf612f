"""The journal: whole or not at all, one writer at a time, nothing served from a damaged file."""

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from contracts.failures import Limit
from contracts.identity import RolloutId
from contracts.sessions import OpenSession, Sampling, SessionLimits
from proxy.errors import JournalUnavailableError, UnauthorizedError
from proxy.graph import Call, Graph
from proxy.journal import Journal
from proxy.sessions import Sessions
from tests.proxy.test_graph import ask, assistant, chat

OPENED = OpenSession(
    rollout=RolloutId(run="run", batch="iteration=000000", group=0, member=0),
    attempt=1,
    policy="run",
    sampling=Sampling(),
    limits=SessionLimits(),
    deadline=time.time() + 60,
)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """An empty journal."""
    opened = Journal(tmp_path / "journal.db")
    yield opened
    opened.close()


def conversation(turns: int) -> Graph:
    """A linear session of `turns` calls."""
    graph, history = Graph(), [{"role": "user", "content": "task"}]
    for turn in range(turns):
        answer = assistant(f"answer {turn}", [{"turn": turn}])
        ask(graph, chat(history), answer)
        history = [*history, answer, {"role": "user", "content": f"observation {turn}"}]
    return graph


async def record(journal: Journal, calls: list[Call]) -> None:
    """Open session `s` and write its calls, all at once."""
    await journal.open_session("s", OPENED)
    await asyncio.gather(*(journal.add_call(call) for call in calls))


async def test_a_session_is_read_back_as_it_was(journal: Journal) -> None:
    graph = conversation(12)
    await record(journal, list(graph.calls.values()))
    await journal.count_replay("s", 3)
    await journal.update_session("s", closed=True, limit=Limit.CALLS, engine_failures=2, diverged_at=3, divergence="why")
    stored = await journal.load("s")
    assert stored is not None
    assert (stored.opened, stored.closed, stored.limit_reached, stored.engine_failures) == (OPENED, True, Limit.CALLS, 2)
    assert (stored.diverged_at, stored.divergence) == (3, "why")
    graph.calls[3].record.replays = 1
    assert [call.full for call in stored.graph.calls.values()] == [call.full for call in graph.calls.values()]
    assert [call.link for call in stored.graph.calls.values()] == [call.link for call in graph.calls.values()]
    assert await journal.open_sessions() == []
    assert await journal.load("t") is None


async def test_what_a_turn_stores_does_not_grow_with_the_turns_before_it(journal: Journal) -> None:
    sizes = [len(call.record.model_dump_json()) for call in conversation(100).calls.values()]
    assert max(sizes[1:]) - min(sizes[1:]) < 64


async def test_a_write_that_fails_takes_no_other_with_it(journal: Journal) -> None:
    first, second, third = conversation(3).calls.values()
    await record(journal, [first])
    results = await asyncio.gather(journal.add_call(second), journal.add_call(first), journal.add_call(third), return_exceptions=True)
    assert [type(result) for result in results] == [type(None), JournalUnavailableError, type(None)]
    stored = await journal.load("s")
    assert stored is not None
    assert sorted(stored.graph.calls) == [0, 1, 2]


async def test_a_full_disk_is_an_error_and_the_journal_works_again_when_there_is_room(journal: Journal) -> None:
    first, second = conversation(2).calls.values()
    await record(journal, [first])
    pages = journal._database.execute("PRAGMA page_count").fetchone()[0]
    journal._database.execute(f"PRAGMA max_page_count={pages}")
    second.record.answer["content"] = "x" * 1_000_000
    with pytest.raises(JournalUnavailableError, match="full"):
        await journal.add_call(second)
    assert not journal.healthy
    journal._database.execute("PRAGMA max_page_count=1000000")
    assert await journal.check(), "it is found out without a call"
    await journal.add_call(second)


def test_a_journal_in_use_is_refused(journal: Journal, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"journal\.db cannot be used: database is locked"):
        Journal(tmp_path / "journal.db")


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(b"this is no database, whatever its name says" * 100)
    with pytest.raises(ValueError, match="cannot be used: file is not a database"):
        Journal(path)


def test_a_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version=99")
    with pytest.raises(ValueError, match="has format 99, this proxy reads format 2"):
        Journal(path)


async def test_a_record_that_has_changed_on_disk_is_an_error_and_never_an_answer(journal: Journal) -> None:
    await record(journal, conversation(2).calls.values())
    assert await journal.load("s")
    journal._database.execute("UPDATE calls SET record = replace(record, 'task', 'tusk') WHERE sequence = 0")
    with pytest.raises(JournalUnavailableError, match="a call of session s is damaged"):
        await journal.load("s")


async def test_closed_sessions_are_forgotten_in_time_and_later_ones_take_their_room(journal: Journal) -> None:
    calls = list(conversation(30).calls.values())
    for call in calls:
        call.record.answer["content"] = "x" * 10_000
    await record(journal, calls)
    pages = journal._database.execute("PRAGMA page_count").fetchone()[0]
    assert await journal.forget(time.time() + 1) == 0, "it is open"
    await journal.update_session("s", closed=True, limit=None, engine_failures=0, diverged_at=None, divergence="")
    assert await journal.forget(time.time() - 60) == 0, "it has just been closed"
    assert await journal.forget(time.time() + 1) == 1
    assert await journal.load("s") is None
    await record(journal, calls)
    assert journal._database.execute("PRAGMA page_count").fetchone()[0] <= pages


async def test_a_session_that_nobody_closed_is_closed_when_its_deadline_is_long_past(journal: Journal) -> None:
    sessions = Sessions(journal, SecretStr("admin"))
    session = await sessions.open(OPENED.model_copy(update={"deadline": 1000.0}), sessions.close)
    assert await sessions.tidy(999.0) == 0
    assert not session.closed
    assert await sessions.tidy(1001.0) == 0
    assert session.closed
    with pytest.raises(UnauthorizedError):
        sessions.authenticate(sessions.key(session.session_id).get_secret_value())


async def test_a_journal_that_is_far_behind_takes_no_more(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.journal._MOST_WAITING", 0)
    with pytest.raises(JournalUnavailableError, match="0 writes behind"):
        await journal.open_session("s", OPENED)
