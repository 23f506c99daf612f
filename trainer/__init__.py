"""The trainer: a service that makes policy version n + 1 out of version n and one batch, with veRL's own engine.

Runs in the trainer's environment. `service` is its API, `updates` one update from start to end, `batches` the way from a manifest to
rows, `engine` veRL's TrainingWorker, `algorithms` advantages and losses by veRL's names, `export` weights and checkpoints.
"""
