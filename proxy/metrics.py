"""What Prometheus sees of the proxy."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY: Final = CollectorRegistry()
_FAST: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5)
_SLOW: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

REQUESTS: Final = Counter("openforge_proxy_requests", "Model requests answered", ["dialect", "status"], registry=REGISTRY)
UNAUTHORIZED: Final = Counter("openforge_proxy_unauthorized", "Requests without a valid credential", ["scope"], registry=REGISTRY)
REPLAYS: Final = Counter("openforge_proxy_replays", "Repeated requests by how they were met", ["how"], registry=REGISTRY)
REPLAYED: Final = Counter("openforge_proxy_replayed_calls", "Calls answered from an earlier attempt's record", ["level"], registry=REGISTRY)
DIVERGED: Final = Counter("openforge_proxy_replays_diverged", "Sessions that left the record that they replay", registry=REGISTRY)
SEGMENTS: Final = Counter("openforge_proxy_segments", "Segments begun", ["reason"], registry=REGISTRY)
SAMPLED: Final = Counter("openforge_proxy_sampled_tokens", "Tokens in recorded answers", ["engine"], registry=REGISTRY)
ENGINE_RETRIES: Final = Counter(
    "openforge_proxy_engine_retries", "Samples that broke off, by what became of them", ["engine", "reason"], registry=REGISTRY
)
IN_FLIGHT: Final = Gauge("openforge_proxy_calls_in_flight", "Calls being sampled", registry=REGISTRY)
SESSIONS: Final = Gauge("openforge_proxy_open_sessions", "Open sessions", registry=REGISTRY)
CALL_SECONDS: Final = Histogram("openforge_proxy_call_seconds", "Arrival to durable answer", buckets=_SLOW, registry=REGISTRY)
WAIT_SECONDS: Final = Histogram("openforge_proxy_engine_wait_seconds", "Wait for an engine", buckets=_SLOW, registry=REGISTRY)
FIRST_TOKEN_SECONDS: Final = Histogram("openforge_proxy_first_token_seconds", "Arrival to first token", buckets=_SLOW, registry=REGISTRY)
JOURNAL_SECONDS: Final = Histogram("openforge_proxy_journal_seconds", "Write to durable", buckets=_FAST, registry=REGISTRY)
JOURNAL_WAITING: Final = Gauge("openforge_proxy_journal_waiting", "Writes that wait for the disk", registry=REGISTRY)
JOURNAL_BATCH: Final = Histogram(
    "openforge_proxy_journal_batch", "Writes in one commit", buckets=(1, 2, 4, 8, 16, 32, 64, 128), registry=REGISTRY
)
