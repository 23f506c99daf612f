"""The proxy's session API: what a session is asked for, and what it recorded."""

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, SecretStr

from contracts.base import Contract, FrozenContract
from contracts.failures import Limit
from contracts.identity import RolloutId


class Sampling(FrozenContract):
    """How the engine samples. The run decides this, not the harness."""

    temperature: float = Field(1.0, ge=0.0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(-1, ge=-1, description="-1 is no limit")
    max_tokens: int = Field(4096, ge=1, description="sampled tokens a call")


class SessionLimits(FrozenContract):
    """What a session may use. Reaching a limit truncates the rollout; it is not a failure."""

    calls: int = Field(200, ge=1)
    tokens: int = Field(1_000_000, ge=1, description="sampled tokens, over all calls")
    seconds: float = Field(1800.0, gt=0, description="wall-clock seconds that the harness may run")


class ReplayConfig(FrozenContract):
    """How a session answers from another one's record (docs/proxy.md, "Replay")."""

    on_divergence: Literal["live", "refuse"] = Field("live", description="sample from there on, or refuse every further call")
    pace: float = Field(1.0, ge=0.0, description="seconds from an answer to the next replayed one, at least: tools compare times of files")


class OpenSession(Contract):
    """Body of `POST /sessions`. Idempotent by (rollout, attempt): the same request returns the same session.

    `replay_of` names the session of an earlier attempt of the same rollout, with the same engine, policy, sampling and harness. It is
    sealed, and its calls are answered again for as long as the harness asks the same. The label `harness` says whose rules of volatile
    text count.
    """

    rollout: RolloutId
    attempt: int = Field(ge=1)
    engine: str = Field("policy", description="name of the engine pool that answers")
    policy: str = Field(description="whose weights the engine must hold: the run's name; the proxy waits until it does")
    sampling: Sampling
    limits: SessionLimits
    deadline: float = Field(description="Unix seconds after which calls are refused")
    labels: dict[str, str] = Field(default_factory=dict)
    replay_of: str | None = Field(None, description="session id")
    replay: ReplayConfig = ReplayConfig()


class SessionOpened(Contract):
    """Answer of `POST /sessions`. The key is derived from the proxy's secret, so nobody needs to store it."""

    session_id: str
    api_key: SecretStr
    base_url: str = Field(description="base URL without /v1, as the proxy is reached from its own host")


class SegmentReason(StrEnum):
    """Why a call began the segment it is in."""

    FIRST = "first"
    COMPACTION = "compaction"
    SUBAGENT = "subagent"
    SIDE_CALL = "side_call"
    REWRITE = "rewrite"
    TOOLS_CHANGED = "tools_changed"


class CallKind(StrEnum):
    """What a call was for."""

    TURN = "turn"
    COMPACTION = "compaction"
    SIDE_CALL = "side_call"
    SUBAGENT = "subagent"


class VersionSpan(FrozenContract):
    """Tokens [start, end) of a sequence were sampled by this policy version."""

    version: int
    start: int
    end: int


class CallTimings(FrozenContract):
    """Seconds, measured at the proxy. `arrived` is Unix time."""

    arrived: float
    waited: float = Field(description="before the engine took the request")
    first_token: float = Field(description="from arrival to the first sampled token")
    total: float


class ReplayLevel(StrEnum):
    """How alike a question is to the recorded one; from best to worst."""

    EQUAL = "equal"
    HARNESS = "harness"  # but for what this harness writes differently each time
    OUTPUT = "output"  # but for what commands print differently each time: dates, durations, temporary names


class Replayed(FrozenContract):
    """Where a replayed call was recorded. `level` is of the messages that the call adds to its parent."""

    session_id: str
    sequence: int
    level: ReplayLevel


class CallRecord(Contract):
    """One model call, exactly as it was sampled.

    `response_ids`, `logprobs`: equal length, one entry a sampled token, the end-of-turn token included where it was sampled.
    A call whose `parent` is set has `prompt_ids` that begin with the parent's `prompt_ids + response_ids`.
    """

    session_id: str
    sequence: int = Field(ge=0, description="order of arrival in the session")
    parent: int | None = Field(description="sequence of the call that this one's prompt extends")
    segment: int = Field(ge=0)
    segment_reason: SegmentReason
    kind: CallKind
    dialect: str
    engine: str
    messages: list[dict[str, Any]] = Field(description="canonical messages of the prompt, chat-completions shape")
    tools: list[dict[str, Any]] = Field(default_factory=list)
    answer: dict[str, Any] = Field(description="canonical assistant message")
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float] = Field(description="natural log-probabilities of `response_ids`, under the distribution that was sampled from")
    versions: list[VersionSpan] = Field(description="spans over `response_ids`")
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    stop_sequence: str | None = Field(None, description="the harness's text at which the answer ends; it is sampled, but not in `answer`")
    timings: CallTimings
    replays: int = Field(0, description="how often the recorded answer was sent again")
    replayed: Replayed | None = Field(None, description="set: nothing was sampled; tokens and messages are those of the session it names")


class ReplayStatus(Contract):
    """How far a session has followed the one that it replays. A record that was followed to its end is no divergence."""

    hits: dict[ReplayLevel, int] = Field(description="replayed calls")
    diverged_at: int | None = Field(
        None, description="sequence of the first call that asked otherwise than the record; it was sampled, or refused"
    )
    reason: str = Field("", description="what differed, without its content")
    refused: bool = Field(False, description="the call at `diverged_at` was refused, and so is every later one: the attempt cannot go on")


class SessionStatus(Contract):
    """Answer of `GET /sessions/{id}` and of `POST /sessions/{id}/close`."""

    session_id: str
    rollout: RolloutId
    attempt: int
    state: Literal["open", "closed"]
    calls: int
    prompt_tokens: int
    response_tokens: int
    segments: int
    limit_reached: Limit | None = None
    engine_failures: int = Field(0, description="calls that ended in an error although the proxy had retried")
    replay: ReplayStatus | None = Field(None, description="none: the session replays no other")


class SessionCalls(Contract):
    """Answer of `GET /sessions/{id}/calls`: every finished call, in order of `sequence`."""

    session_id: str
    calls: list[CallRecord]
