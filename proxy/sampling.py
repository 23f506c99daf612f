"""One answer from a pool of engines: waiting, retries, continuation, and the check of what sampled it.

Invariants:
1. A sample that broke off is continued, by any replica, if it is certain which weights sampled it: the next request has its tokens
   at the end of the prompt, which makes the whole one sample, and the spans of the answer show the versions.
2. It is certain if the engine said so at the end (an abort), or if it named its weights after the first token had come: publication
   waits until requests in flight have ended, so no sample begins on one version and goes on with another.
3. Otherwise, and under a grammar, which cannot be taken up in the middle, what broke off is thrown away; if part of it had been shown,
   the answer is given up and the harness has to ask again.
4. An answer counts only if the engine's own spans cover all of its tokens and belong to the session's policy.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from contracts.failures import Limit
from contracts.sessions import VersionSpan
from contracts.updates import parse_weight_label
from proxy.engine import Chunk, Engine, EngineFailedError, EnginePool, EngineRefusedError, policy_of
from proxy.errors import AnswerCutError, BadRequestError, EngineUnavailableError, LimitReachedError
from proxy.metrics import ENGINE_RETRIES, WAIT_SECONDS

log = logging.getLogger(__name__)
_LONGEST_PAUSE = 2.0
_CONFIRM_SECONDS = 0.2  # one question to the engine then serves every answer that began before it


@dataclass(frozen=True)
class Job:
    """What is to be sampled. `deadline` is Unix time; `params` are the engine's, without `max_tokens`."""

    session_id: str
    request_id: str
    policy: str
    prompt_ids: list[int]
    max_tokens: int
    params: dict[str, Any]
    deadline: float


@dataclass
class Sample:
    """What has been sampled. `spans` are (weight label, start, end) over `ids`; `taken` and `first_token` are Unix times."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    finish_reason: str | None = None
    engine_url: str = ""
    taken: float | None = None
    first_token: float | None = None

    @property
    def versions(self) -> list[VersionSpan]:
        """The spans by policy version, those of the same version joined."""
        spans: list[VersionSpan] = []
        for label, start, end in self.spans:
            parsed = parse_weight_label(label)
            if parsed is None:
                raise ValueError(f"{label!r} is not the label of a policy version")
            if spans and spans[-1].version == parsed[1]:
                start = spans.pop().start
            spans.append(VersionSpan(version=parsed[1], start=start, end=end))
        return spans

    def extend(self, chunk: Chunk, offset: int) -> None:
        """Take in what an engine sent for a request that began at token `offset` of the answer."""
        self.ids += chunk.ids
        self.logprobs += chunk.logprobs
        self.spans += [(label, start + offset, end + offset) for label, start, end in chunk.spans if start < end]
        self.finish_reason = chunk.finish_reason
        if chunk.ids and self.first_token is None:
            self.first_token = time.time()

    def cut_back(self, length: int) -> None:
        """Throw away all tokens from `length` on."""
        del self.ids[length:], self.logprobs[length:]
        self.spans = [span for span in self.spans if span[2] <= length]


class Sampler:
    """Samples one answer. `show` is called with the tokens so far while the answer grows; it says whether a client saw more."""

    def __init__(self, pool: EnginePool, job: Job, show: Callable[[list[int]], bool]) -> None:
        self._pool = pool
        self._job = job
        self._show = show
        self._sample = Sample()
        self._shown = False
        self._failure = ""
        self._engine: Engine | None = None
        self._begun: float | None = None  # when the first token of this request came, in monotonic seconds
        self._probe: asyncio.Task[None] | None = None

    async def run(self) -> Sample:
        """Sample until there is a whole answer.

        Raises:
            LimitReachedError: the deadline passed while an engine was at work.
            BadRequestError: the engine cannot enforce the schema.
            EngineUnavailableError: the deadline passed and no engine could work, or the engine refuses the request.
            AnswerCutError: the engine broke off after part of the answer had been shown.
        """
        try:
            async with asyncio.timeout(self._job.deadline - time.time()):
                await self._until_whole()
        except TimeoutError:
            if self._failure or not any(engine.holds(self._job.policy) for engine in self._pool.engines):
                why = self._failure or f"none holds weights of {self._job.policy!r}"
                raise EngineUnavailableError(f"no engine answered before the session's deadline: {why}") from None
            raise LimitReachedError(Limit.WALL_CLOCK, "the session's deadline has passed") from None
        except EngineRefusedError as error:
            if not self._continuable:  # nothing else in a request is of the harness's making
                raise BadRequestError(f"the schema cannot be enforced: {error}") from error
            raise EngineUnavailableError(str(error)) from error
        return self._sample

    async def _until_whole(self) -> None:
        sample, failures = self._sample, 0
        for attempt in itertools.count():
            kept = len(sample.ids)
            if kept >= self._job.max_tokens:  # an abort at the very last token
                sample.finish_reason = "length"
                return
            try:
                await self._request(attempt, kept)
                self._failure, failures = "", 0
            except EngineFailedError as error:
                self._failure, failures = str(error), failures + 1
                self._keep_or_discard(kept)
                await asyncio.sleep(min(0.1 * 2**failures, _LONGEST_PAUSE))
                continue
            if sample.finish_reason != "abort":
                return
            ENGINE_RETRIES.labels(self._pool.name, "abort").inc()
            if not self._continuable:
                self._discard(kept)

    async def _request(self, attempt: int, kept: int) -> None:
        """Ask one engine for what is missing of the answer."""
        job, sample, waiting = self._job, self._sample, time.time()
        self._begun = self._probe = None
        self._engine = engine = await self._pool.acquire(job.policy, job.session_id)
        WAIT_SECONDS.observe(time.time() - waiting)
        sample.engine_url = engine.url
        sample.taken = sample.taken or time.time()
        shown = kept
        params = {**job.params, "max_tokens": job.max_tokens - kept}
        async for chunk in engine.generate(job.prompt_ids + sample.ids, params, f"{job.request_id}-{attempt}"):
            sample.extend(chunk, kept)
            self._begun = self._begun or time.monotonic()
            # Showing parses the answer from its start, so a long one is shown less often: the cost stays linear.
            if chunk.finish_reason is None and len(sample.ids) - shown > len(sample.ids) // 64:
                shown = len(sample.ids)
                self._shown = self._show(sample.ids) or self._shown
                age = time.monotonic() - self._begun
                if self._shown and not self._probe and age > _CONFIRM_SECONDS:  # a failure would be seen
                    self._probe = asyncio.create_task(engine.probe(age))
        spans = [span for span in sample.spans if span[1] >= kept]
        if sum(end - start for _, start, end in spans) != len(sample.ids) - kept:
            raise EngineFailedError(f"weight versions {spans} do not cover the {len(sample.ids) - kept} sampled tokens")
        if foreign := sorted({label for label, _, _ in spans if policy_of(label) != job.policy}):
            engine.lost(f"it answered with weights {foreign}")
            raise EngineFailedError(f"the engine sampled with weights {foreign}, not with {job.policy!r}")

    @property
    def _continuable(self) -> bool:
        return "structured_outputs" not in self._job.params

    def _keep_or_discard(self, kept: int) -> None:
        """After a failure: keep the tokens from `kept` on if it is certain whose weights sampled them."""
        confirmed = self._engine.confirmed if self._engine and self._begun else None
        sampled, ended = len(self._sample.ids), self._sample.finish_reason is not None
        if (
            not confirmed
            or ended
            or not self._continuable
            or confirmed[1] < (self._begun or 0)
            or policy_of(confirmed[0]) != self._job.policy
        ):
            return self._discard(kept)
        log.warning("call %s: going on after %d tokens: %s", self._job.request_id, sampled, self._failure)
        ENGINE_RETRIES.labels(self._pool.name, "continued").inc()
        self._sample.spans = [span for span in self._sample.spans if span[2] <= kept]
        if sampled > kept:
            self._sample.spans.append((confirmed[0], kept, sampled))
        return None

    def _discard(self, kept: int) -> None:
        log.warning("call %s: sampling again: %s", self._job.request_id, self._failure)
        ENGINE_RETRIES.labels(self._pool.name, "failed").inc()
        self._sample.cut_back(kept)
        if self._shown:
            raise AnswerCutError("the engine broke off in mid-answer; please ask again")
