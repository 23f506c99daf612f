"""Types that cross a process border: configuration, messages, the Parquet schema, outcomes and causes.

Nothing here does I/O. Everything is importable from a Temporal workflow except `contracts.trajectory`, which holds the
Arrow schema and so imports pyarrow.
"""
