"""The Arrow schema of a trajectory file: one row a sample (a segment of a rollout). docs/trajectories.md explains it.

`response_ids`, `response_mask` and `logprobs` have equal length. `response_mask` is true where the policy sampled the token
and may learn from it; where it is false (tool output, template text, end of a turn that was not sampled) the log-probability
is 0. A rollout that recorded no call has one row with empty lists, so that its ending is on file too.
"""

from typing import Final

import pyarrow as pa

TRAJECTORY_FORMAT: Final = 1

VERSION_SPAN: Final = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])

TRAJECTORY_SCHEMA: Final = pa.schema(
    [
        # identity
        pa.field("run", pa.string(), nullable=False),
        pa.field("batch", pa.string(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("member", pa.int32(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("task_digest", pa.string(), nullable=False),
        pa.field("rollout", pa.string(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("session", pa.string(), nullable=False),
        pa.field("segment", pa.int32(), nullable=False),
        pa.field("segment_reason", pa.string()),
        pa.field("kind", pa.string()),  # of the segment's first call: turn, compaction, side_call, subagent
        pa.field("trainable", pa.bool_(), nullable=False),  # false: side calls, and rows without a call
        # provenance
        pa.field("harness", pa.string(), nullable=False),
        pa.field("harness_version", pa.string(), nullable=False),
        pa.field("policy", pa.string(), nullable=False),  # whose weights answered: the run, or a teacher
        pa.field("dialect", pa.string()),
        pa.field("engine", pa.string(), nullable=False),
        # tokens
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("versions", pa.list_(VERSION_SPAN), nullable=False),  # spans over response_ids
        pa.field("temperature", pa.float32(), nullable=False),
        # result
        pa.field("reward", pa.float64()),  # null: no valid reward; never 0 in its place
        pa.field("reward_parts", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("cause", pa.string()),
        pa.field("limit", pa.string()),
        pa.field("message", pa.string(), nullable=False),
        # cost
        pa.field("calls", pa.int32(), nullable=False),
        pa.field("prompt_tokens", pa.int64(), nullable=False),  # prompt tokens over the segment's calls
        pa.field("response_tokens", pa.int64(), nullable=False),  # sampled tokens over the segment's calls
        pa.field("phases", pa.map_(pa.string(), pa.float64()), nullable=False),  # seconds by phase of the rollout
        pa.field("harness_cpu_seconds", pa.float64(), nullable=False),
        pa.field("harness_peak_memory_mb", pa.float64(), nullable=False),
        # for people
        pa.field("messages", pa.string(), nullable=False),  # JSON: the segment as chat messages, the answers included
        pa.field("tools", pa.string(), nullable=False),  # JSON: the tools offered
        pa.field("images", pa.list_(pa.string()), nullable=False),  # storage paths, by digest
    ],
    metadata={"openforge.trajectory.format": str(TRAJECTORY_FORMAT)},
)
