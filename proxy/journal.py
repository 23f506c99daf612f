"""The journal of sessions and calls: SQLite, one writer thread, group commit.

Invariants:
1. A write is on disk when its future resolves: WAL with synchronous=FULL syncs the log at every commit. NORMAL would not: it
   loses the last commits at a power failure, after the harness has already acted on them.
2. All writes that wait when the writer is free share one transaction, so a sync costs one batch of calls, not one call each.
   Within it each write has a savepoint: one that fails takes no other with it.
3. A record is whole or the write fails. Nothing is cut, nothing is dropped from a queue. A record that has changed on disk since it was
   written is an error, never an answer.
4. One process at a time: the database is opened exclusively, and a second proxy on the same file is refused at the start.
"""

import asyncio
import json
import queue
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contracts.failures import Limit
from contracts.sessions import CallRecord, OpenSession
from proxy.errors import JournalUnavailableError
from proxy.graph import Call, Echo, Graph
from proxy.metrics import JOURNAL_BATCH, JOURNAL_SECONDS, JOURNAL_WAITING

_FORMAT = 2
_MOST_WAITING = 10_000  # writes; more would be minutes behind, and memory without end
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY,
    opened TEXT NOT NULL,            -- OpenSession as JSON
    closed_at REAL,                  -- Unix seconds; null while the session is open
    limit_reached TEXT,
    engine_failures INTEGER NOT NULL DEFAULT 0,
    diverged_at INTEGER,             -- the call at which a replay left the record, if it has
    divergence TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS calls (
    session_id TEXT NOT NULL REFERENCES sessions (id),
    sequence INTEGER NOT NULL,
    question TEXT NOT NULL,          -- canonical.Question.digest
    terms TEXT NOT NULL,             -- canonical.Question.terms
    context_window INTEGER NOT NULL,
    cut TEXT,                        -- the session's limit that cut the answer short, if one did
    replays INTEGER NOT NULL DEFAULT 0,
    record TEXT NOT NULL,            -- CallRecord as JSON, in the stored form of proxy.graph
    checksum INTEGER NOT NULL,       -- CRC-32 of record
    echo TEXT,                       -- graph.Echo as JSON, of a replayed call
    PRIMARY KEY (session_id, sequence)
) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class StoredSession:
    """A session as the journal has it."""

    session_id: str
    opened: OpenSession
    closed: bool
    limit_reached: Limit | None
    engine_failures: int
    diverged_at: int | None
    divergence: str
    graph: Graph


@dataclass
class _Job:
    work: Callable[[sqlite3.Connection], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    outcome: Any = None
    error: Exception | None = None

    def settle(self) -> None:
        """Runs in the event loop."""
        if self.future.cancelled():
            return
        if self.error is None:
            self.future.set_result(self.outcome)
        else:
            self.future.set_exception(JournalUnavailableError(f"the journal cannot be written: {self.error}"))


class Journal:
    """The journal in one file. All methods are for the event loop; the writer thread does the work."""

    def __init__(self, path: Path) -> None:
        """Open or create `path`. Raises ValueError with what is wrong: not writable, in use, damaged, of another format."""
        self._path = path
        self.healthy = True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"the journal {path} cannot be used: {error}") from error
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="journal", daemon=True)
        self._writer.start()

    def _prepare(self) -> None:
        execute = self._database.execute
        execute("PRAGMA locking_mode=EXCLUSIVE")
        execute("PRAGMA journal_mode=WAL")
        execute("PRAGMA synchronous=FULL")
        execute("PRAGMA foreign_keys=ON")
        if (found := execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(f"it is damaged: {found}")
        version = execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, _FORMAT):
            raise sqlite3.DatabaseError(f"it has format {version}, this proxy reads format {_FORMAT}")
        self._database.executescript(_SCHEMA)
        execute(f"PRAGMA user_version={_FORMAT}")

    def close(self) -> None:
        """Write what waits, then close."""
        self._jobs.put(None)
        self._writer.join()
        self._database.close()

    async def check(self) -> bool:
        """Whether writes succeed. After one that failed, a small one is tried."""
        if not self.healthy:
            with suppress(JournalUnavailableError):
                await self._submit(lambda database: database.execute(f"PRAGMA user_version={_FORMAT}"))
        return self.healthy

    async def open_session(self, session_id: str, opened: OpenSession) -> None:
        """Record a new session, or new terms of one that is there."""
        sql = "INSERT INTO sessions (id, opened) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET opened = excluded.opened"
        await self._submit(lambda database: database.execute(sql, (session_id, opened.model_dump_json())))

    async def update_session(
        self, session_id: str, *, closed: bool, limit: Limit | None, engine_failures: int, diverged_at: int | None, divergence: str
    ) -> None:
        """Record how a session stands."""
        sql = (
            "UPDATE sessions SET closed_at = CASE WHEN ? THEN coalesce(closed_at, ?) END, limit_reached = ?, engine_failures = ?, "
            "diverged_at = ?, divergence = ? WHERE id = ?"
        )
        values = (closed, time.time(), limit, engine_failures, diverged_at, divergence, session_id)
        await self._submit(lambda database: database.execute(sql, values))

    async def add_call(self, call: Call) -> None:
        """Record a finished call."""
        sql = (
            "INSERT INTO calls (session_id, sequence, question, terms, context_window, cut, record, checksum, echo) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        )
        record, echo = call.record, json.dumps(asdict(call.echo)) if call.echo else None
        text = record.model_dump_json()
        place = (record.session_id, record.sequence, call.question, call.terms, call.window, call.cut)
        values = (*place, text, zlib.crc32(text.encode()), echo)
        await self._submit(lambda database: database.execute(sql, values))

    async def count_replay(self, session_id: str, sequence: int) -> None:
        """Record that a call's answer is sent again."""
        sql = "UPDATE calls SET replays = replays + 1 WHERE session_id = ? AND sequence = ?"
        await self._submit(lambda database: database.execute(sql, (session_id, sequence)))

    async def load(self, session_id: str) -> StoredSession | None:
        """A session with all its calls."""
        stored: StoredSession | None = await self._submit(lambda database: _load(database, session_id))
        return stored

    async def open_sessions(self) -> list[StoredSession]:
        """Every session that has not been closed."""
        sql = "SELECT id FROM sessions WHERE closed_at IS NULL"
        ids: list[tuple[str]] = await self._submit(lambda database: database.execute(sql).fetchall())
        return [stored for (session_id,) in ids if (stored := await self.load(session_id))]

    async def forget(self, before: float) -> int:
        """Remove the sessions that were closed before a time (Unix seconds), with their calls; returns how many.

        Later calls take their room in the file, which does not grow beyond what it once held.
        """

        def work(database: sqlite3.Connection) -> int:
            database.execute("DELETE FROM calls WHERE session_id IN (SELECT id FROM sessions WHERE closed_at < ?)", (before,))
            removed: int = database.execute("DELETE FROM sessions WHERE closed_at < ?", (before,)).rowcount
            return removed

        return int(await self._submit(work))

    async def _submit(self, work: Callable[[sqlite3.Connection], Any]) -> Any:
        if (waiting := self._jobs.qsize()) >= _MOST_WAITING:
            raise JournalUnavailableError(f"the journal is {waiting} writes behind")
        JOURNAL_WAITING.set(waiting)
        loop = asyncio.get_running_loop()
        job = _Job(work, loop.create_future(), loop)
        started = time.perf_counter()
        self._jobs.put(job)
        try:
            return await job.future
        finally:
            JOURNAL_SECONDS.observe(time.perf_counter() - started)

    def _write(self) -> None:
        """Runs in the writer thread."""
        stopping = False
        while not stopping:
            batch = [self._jobs.get()]
            while not self._jobs.empty():
                batch.append(self._jobs.get())
            jobs = [job for job in batch if job is not None]
            stopping = len(jobs) < len(batch)
            if jobs:
                self._commit(jobs)
                JOURNAL_BATCH.observe(len(jobs))

    def _commit(self, jobs: list[_Job]) -> None:
        database = self._database
        try:
            database.execute("BEGIN IMMEDIATE")
            for job in jobs:
                self._attempt(job)
            database.execute("COMMIT")
            self.healthy = all(job.error is None for job in jobs)
        except Exception as error:  # whatever it is, the writer must live and those who wait must hear of it
            self.healthy = False
            if database.in_transaction:
                database.execute("ROLLBACK")
            for job in jobs:
                job.error = error
        for job in jobs:
            job.loop.call_soon_threadsafe(job.settle)

    def _attempt(self, job: _Job) -> None:
        self._database.execute("SAVEPOINT job")
        try:
            job.outcome = job.work(self._database)
        except Exception as error:
            if not self._database.in_transaction:  # a full disk or a failed read ends the transaction, and with it the batch
                raise
            self._database.execute("ROLLBACK TO job")
            job.error = error
        self._database.execute("RELEASE job")


def _load(database: sqlite3.Connection, session_id: str) -> StoredSession | None:
    sql = "SELECT opened, closed_at IS NOT NULL, limit_reached, engine_failures, diverged_at, divergence FROM sessions WHERE id = ?"
    row = database.execute(sql, (session_id,)).fetchone()
    if row is None:
        return None
    graph = Graph()
    calls = database.execute(
        "SELECT question, terms, context_window, cut, replays, record, checksum, echo FROM calls WHERE session_id = ? ORDER BY sequence",
        (session_id,),
    )
    for question, terms, window, cut, replays, text, checksum, echo in calls:
        if zlib.crc32(text.encode()) != checksum:
            raise sqlite3.DatabaseError(f"a call of session {session_id} is damaged: its record is not what was written")
        record = CallRecord.model_validate_json(text)
        record.replays = replays
        parent = None if record.parent is None else graph.calls[record.parent]
        graph.add(Call(record, question, terms, window, Limit(cut) if cut else None, parent, _echo(echo) if echo else None))
    opened, closed, limit, engine_failures, diverged_at, divergence = row
    return StoredSession(
        session_id,
        OpenSession.model_validate_json(opened),
        bool(closed),
        Limit(limit) if limit else None,
        engine_failures,
        diverged_at,
        divergence,
        graph,
    )


def _echo(text: str) -> Echo:
    stored = json.loads(text)
    return Echo(stored["link"], stored["opening"], tuple(stored["stale"]))
