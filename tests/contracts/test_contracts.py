"""Messages refuse what they do not know, ledgers balance, identities are unique."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from contracts.batches import Ledger
from contracts.config import RunConfig
from contracts.failures import Cause, Limit, Outcome
from contracts.identity import RolloutId, evaluation_batch, iteration_batch
from contracts.rollouts import Ending, RolloutResult
from contracts.updates import parse_weight_label, weight_label

MINIMAL = {"name": "run", "policy": {"model": "/m"}, "tasks": "/t", "training": {"iterations": 1}}

ENDINGS = st.one_of(
    st.just(Ending(outcome=Outcome.COMPLETED)),
    st.just(Ending(outcome=Outcome.CANCELLED)),
    st.sampled_from(Limit).map(lambda limit: Ending(outcome=Outcome.TRUNCATED, limit=limit)),
    st.sampled_from(Cause).map(lambda cause: Ending(outcome=Outcome.FAILED, cause=cause)),
)


def results(endings: list[Ending]) -> list[RolloutResult]:
    return [
        RolloutResult(
            rollout=RolloutId(run="run", batch=iteration_batch(0), group=0, member=number),
            task="t",
            ending=ending,
            attempts=1,
        )
        for number, ending in enumerate(endings)
    ]


@given(st.lists(ENDINGS, max_size=40))
def test_a_ledger_accounts_for_every_rollout_exactly_once(endings: list[Ending]) -> None:
    ledger = Ledger.of(results(endings), started=len(endings))
    assert ledger.completed + sum(ledger.truncated.values()) + sum(ledger.failed.values()) + ledger.cancelled == len(endings)


@given(st.lists(ENDINGS, max_size=10), st.integers(0, 20))
def test_a_ledger_that_lost_a_rollout_cannot_be_made(endings: list[Ending], started: int) -> None:
    if started != len(endings):
        with pytest.raises(ValidationError, match="does not balance"):
            Ledger.of(results(endings), started=started)


def test_a_minimal_config_is_enough() -> None:
    assert RunConfig.model_validate(MINIMAL).harness.name == "codex"


@pytest.mark.parametrize("where", [(), ("policy",), ("training",)])
def test_an_unknown_key_is_refused_by_name(where: tuple[str, ...]) -> None:
    config: dict[str, object] = {**MINIMAL, "policy": {"model": "/m"}, "training": {"iterations": 1}}
    inner = config
    for key in where:
        inner = inner[key]  # type: ignore[assignment]
    inner["grup_size"] = 8
    with pytest.raises(ValidationError, match="grup_size"):
        RunConfig.model_validate(config)


def test_a_config_without_anything_to_do_is_refused() -> None:
    with pytest.raises(ValidationError, match="nothing to do"):
        RunConfig.model_validate({**MINIMAL, "training": {"iterations": 0}})


@given(st.integers(0, 9999), st.integers(0, 999), st.integers(1, 9), st.integers(0, 10**6))
def test_a_sandbox_id_is_a_dns_label(group: int, member: int, attempt: int, version: int) -> None:
    rollout = RolloutId(run="a" * 63, batch=evaluation_batch(version, "held_out", "sampled"), group=group, member=member)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", rollout.sandbox_id(attempt))


def test_sandbox_ids_of_different_runs_and_batches_differ() -> None:
    names = ("one-long-name-of-a-training-run-1", "one-long-name-of-a-training-run-2")
    batches = (iteration_batch(1), evaluation_batch(1, "train", "sampled"), evaluation_batch(1, "train", "greedy"))
    ids = {RolloutId(run=run, batch=batch, group=0, member=0).sandbox_id(1) for run in names for batch in batches}
    assert len(ids) == len(names) * len(batches)


@given(st.from_regex(r"[a-z0-9][a-z0-9-]{0,20}", fullmatch=True), st.integers(0, 10**9))
def test_a_weight_label_says_run_and_version(run: str, version: int) -> None:
    assert parse_weight_label(weight_label(run, version)) == (run, version)


@pytest.mark.parametrize("label", ["default", "", "7", "@7", "run@", "run@x", "run@-1"])
def test_a_foreign_weight_label_is_no_version(label: str) -> None:
    assert parse_weight_label(label) is None
