"""The trainer service on batches made by hand: what it learns, what it leaves out, what survives its death."""

import json
import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from contracts.failures import Cause
from contracts.identity import checkpoint_prefix, version_prefix
from contracts.updates import VersionManifest
from tests.support.reference import reference_logprobs
from tests.trainer.conftest import Trainer, trainer_server
from tests.trainer.synthetic import Made, seal

pytestmark = [pytest.mark.trainer, pytest.mark.slow]
RL: dict[str, Any] = {"iterations": 1, "learning_rate": 1e-3, "mini_batch_size": 4, "micro_batch_size": 4}
SAME = 5e-5  # between weights after steps of size 1e-3 that differ in the order of summation only
SFT: dict[str, Any] = {"epochs": 6, "batch_size": 4, "learning_rate": 5e-3, "warmup_steps": 2}


@cache
def rollouts(model: Path, groups: int = 2, size: int = 4) -> tuple[Made, ...]:
    """Random rollouts with the log-probabilities that the model gives them; half of each group is right."""
    draw = random.Random(0)
    tokens = [([draw.randrange(9, 400) for _ in range(5)], [draw.randrange(9, 400) for _ in range(6)]) for _ in range(groups * size)]
    logprobs = reference_logprobs(model, tokens)
    return tuple(
        Made(place // size, prompt, response, logprobs[place], reward=float(place % 2)) for place, (prompt, response) in enumerate(tokens)
    )


def weights(trainer: Trainer, run: str, version: int) -> dict[str, Any]:
    directory = trainer.storage.local_root
    assert directory
    with safe_open(str(directory / version_prefix(run, version) / "model.safetensors"), framework="numpy") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)


def differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return any((one[name] != other[name]).any() for name in one)


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between two weights."""
    return max(float(abs(one[name] - other[name]).max()) for name in one)


def test_an_update_makes_a_version_whose_recorded_log_probabilities_agree(trainer: Trainer) -> None:
    status = trainer.update("agree", 0, seal(trainer.storage, "agree", 0, rollouts(trainer.model)), RL)
    assert status["state"] == "finished", status
    assert status["result"]["rows"] == 8
    assert status["result"]["metrics"]["logprob_diff_max"] < 1e-4
    manifest = VersionManifest.model_validate_json(trainer.storage.read("runs/agree/versions/version=000001/manifest.json"))
    assert (manifest.version, manifest.parent) == (1, 0)
    config = json.loads(trainer.storage.read("runs/agree/versions/version=000001/config.json"))
    assert config["dtype"] == "float32"
    assert {tensor.dtype.name for tensor in weights(trainer, "agree", 1).values()} == {"float32"}


def test_what_was_right_becomes_likelier_and_what_was_wrong_less(trainer: Trainer) -> None:
    made = rollouts(trainer.model, groups=1, size=4)
    trainer.update("learn", 0, seal(trainer.storage, "learn", 0, made), RL)
    root = trainer.storage.local_root
    assert root
    after = reference_logprobs(root / version_prefix("learn", 1), [(entry.prompt_ids, entry.response_ids) for entry in made])
    for entry, now in zip(made, after, strict=True):
        assert (sum(now) > sum(entry.logprobs)) == (entry.reward == 1.0)


def test_the_learning_rate_falls_over_the_iterations_of_a_cosine_schedule(trainer: Trainer) -> None:
    made, rates = rollouts(trainer.model), []
    for version in range(3):
        status = trainer.update(
            "cosine", version, seal(trainer.storage, "cosine", version, made), RL | {"schedule": "cosine", "iterations": 2}
        )
        rates.append(status["result"]["metrics"]["learning_rate"])
    assert rates == pytest.approx([1e-3, 5.5e-4, 1e-4])
    first, second, third = (weights(trainer, "cosine", version) for version in (1, 2, 3))
    assert distance(third, second) < 0.5 * distance(second, first)


def test_imitation_makes_demonstrations_likelier(trainer: Trainer) -> None:
    made = rollouts(trainer.model, groups=4, size=2)
    status = trainer.update("imitate", 0, seal(trainer.storage, "imitate", 0, made), SFT)
    assert status["result"]["metrics"]["loss"] < 0.7 * status["result"]["metrics"]["loss_first"]
    assert status["result"]["metrics"]["steps"] == 12


def test_the_same_request_again_returns_the_same_version(trainer: Trainer) -> None:
    manifest = seal(trainer.storage, "again", 0, rollouts(trainer.model))
    first = trainer.update("again", 0, manifest, RL)
    before = weights(trainer, "again", 1)
    assert trainer.update("again", 0, manifest, RL) == first
    assert not differ(before, weights(trainer, "again", 1))


def test_the_same_batch_makes_the_same_version(trainer: Trainer) -> None:
    made = rollouts(trainer.model)
    for run in ("twin-a", "twin-b"):
        trainer.update(run, 0, seal(trainer.storage, run, 0, made), RL)
    assert not differ(weights(trainer, "twin-a", 1), weights(trainer, "twin-b", 1))


def test_a_failed_rollout_is_in_neither_loss_nor_baseline(trainer: Trainer) -> None:
    made = rollouts(trainer.model)
    broken = Made(0, [9, 10], [11, 12], [-1.0, -1.0], reward=None, cause=Cause.SANDBOX_LOST)
    trainer.update("without", 0, seal(trainer.storage, "without", 0, made), RL)
    status = trainer.update("with", 0, seal(trainer.storage, "with", 0, [*made, broken]), RL)
    assert status["result"]["rows_left_out"] == {"failed: sandbox_lost": 1}
    assert not differ(weights(trainer, "without", 1), weights(trainer, "with", 1))


def test_tokens_that_were_not_sampled_teach_nothing(trainer: Trainer) -> None:
    mask = [True, True, False, False, True, True]
    made = [replace(m, mask=mask) for m in rollouts(trainer.model)]
    changed = [replace(m, logprobs=[lp if keep else -99.0 for lp, keep in zip(m.logprobs, mask, strict=True)]) for m in made]
    for run, entries in (("mask-a", made), ("mask-b", changed)):
        status = trainer.update(run, 0, seal(trainer.storage, run, 0, entries), RL)
        assert status["result"]["metrics"]["sampled_tokens"] == 8 * 4
    assert not differ(weights(trainer, "mask-a", 1), weights(trainer, "mask-b", 1))


def test_a_rollout_in_segments_counts_once_and_teaches_what_it_would_in_one(trainer: Trainer) -> None:
    made = rollouts(trainer.model, groups=1, size=4)
    cut = [replace(made[0], segments=3), replace(made[1], segments=2), *made[2:]]
    for run, entries, rows in (("one-row", made, 4), ("segments", cut, 7)):
        status = trainer.update(run, 0, seal(trainer.storage, run, 0, entries), RL | {"mini_batch_size": 8})
        assert status["result"]["rows"] == rows
    assert distance(weights(trainer, "one-row", 1), weights(trainer, "segments", 1)) < SAME


def test_padding_and_the_cut_into_micro_batches_weigh_nothing(trainer: Trainer) -> None:
    made = rollouts(trainer.model, groups=1, size=7)
    uneven = [
        replace(entry, response_ids=entry.response_ids[: place + 1], logprobs=entry.logprobs[: place + 1])
        for place, entry in enumerate(made[:6])
    ]
    for run, micro in (("micro-1", 1), ("micro-8", 8)):
        method = RL | {"mini_batch_size": 8, "micro_batch_size": micro}
        trainer.update(run, 0, seal(trainer.storage, run, 0, [*uneven, made[6]]), method, max_context=16)
    assert distance(weights(trainer, "micro-1", 1), weights(trainer, "micro-8", 1)) < SAME


def test_rows_that_do_not_fill_the_last_mini_batch_are_trained_on(trainer: Trainer) -> None:
    status = trainer.update("odd", 0, seal(trainer.storage, "odd", 0, rollouts(trainer.model, groups=1, size=5)), RL)
    assert (status["result"]["rows"], status["result"]["metrics"]["steps"]) == (5, 2)


def test_a_rollout_alone_in_its_group_has_no_baseline_and_is_left_out(trainer: Trainer) -> None:
    made = rollouts(trainer.model)
    alone = Made(7, made[0].prompt_ids, made[0].response_ids, made[0].logprobs, reward=1.0)
    status = trainer.update("alone", 0, seal(trainer.storage, "alone", 0, [*made, alone]), RL)
    assert status["result"]["rows_left_out"] == {"alone in its group": 1}


def test_a_batch_without_a_teachable_rollout_still_makes_the_next_version_and_says_why(trainer: Trainer) -> None:
    broken = [Made(0, [9], [10], [-1.0], reward=None, cause=Cause.ENGINE_UNAVAILABLE) for _ in range(3)]
    status = trainer.update("empty", 0, seal(trainer.storage, "empty", 0, broken), RL)
    assert (status["result"]["version"], status["result"]["rows"]) == (1, 0)
    assert status["result"]["rows_left_out"] == {"failed: engine_unavailable": 3}
    assert trainer.storage.exists("runs/empty/versions/version=000001/model.safetensors")


def test_the_optimizer_remembers_across_a_batch_without_a_teachable_rollout(trainer: Trainer) -> None:
    made = rollouts(trainer.model)
    broken = [Made(0, [9], [10], [-1.0], reward=None, cause=Cause.ENGINE_UNAVAILABLE)]
    method = RL | {"mini_batch_size": 8}
    for run, batches in (("straight", [made, made]), ("detour", [made, broken, made])):
        for number, batch in enumerate(batches):
            assert trainer.update(run, number, seal(trainer.storage, run, number, batch), method)["state"] == "finished"
    assert distance(weights(trainer, "straight", 2), weights(trainer, "detour", 3)) < SAME
    assert trainer.storage.exists(f"{checkpoint_prefix('detour', 2)}/manifest.json")


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "opo"])
def test_estimators_are_chosen_by_verls_names(trainer: Trainer, estimator: str) -> None:
    run = f"est-{estimator.replace('_', '-')}"
    manifest = seal(trainer.storage, run, 0, rollouts(trainer.model))
    status = trainer.update(run, 0, manifest, RL | {"advantage": estimator})
    assert status["state"] == "finished", status


@pytest.mark.parametrize("loss", ["gspo", "clip_cov", "kl_cov"])
def test_policy_losses_are_chosen_by_verls_names(trainer: Trainer, loss: str) -> None:
    run = f"loss-{loss.replace('_', '-')}"
    status = trainer.update(run, 0, seal(trainer.storage, run, 0, rollouts(trainer.model)), RL | {"policy_loss": loss})
    assert status["state"] == "finished", status


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantage": "grop"}, "training.advantage is 'grop'; allowed: .*grpo"),
        ({"advantage": "gae"}, "allowed: .*grpo"),
        ({"policy_loss": "x"}, "allowed: .*vanilla"),
        ({"policy_loss": "dro"}, "allowed: .*vanilla"),
    ],
)
def test_an_unknown_algorithm_is_refused_with_those_that_exist(trainer: Trainer, change: dict[str, str], message: str) -> None:
    status = trainer.update("unknown", 0, seal(trainer.storage, "unknown", 0, rollouts(trainer.model)), RL | change)
    assert (status["state"], status["retryable"]) == ("failed", False)
    assert re.search(message, status["error"])


def test_a_batch_that_is_not_sealed_is_refused(trainer: Trainer) -> None:
    status = trainer.update("unsealed", 0, "runs/unsealed/iteration=000000/manifest.json", RL)
    assert (status["state"], status["retryable"]) == ("failed", False)
    assert "manifest.json" in status["error"]


def test_a_file_that_is_not_the_one_in_the_manifest_is_refused(trainer: Trainer) -> None:
    made = rollouts(trainer.model)
    manifest = seal(trainer.storage, "tampered", 0, made)
    sealed = trainer.storage.read(manifest)
    seal(trainer.storage, "tampered", 0, [replace(made[0], reward=1.0), *made[1:]])
    trainer.storage.write(manifest, sealed)
    status = trainer.update("tampered", 0, manifest, RL)
    assert (status["state"], status["retryable"]) == ("failed", False)
    assert "its digest differs" in status["error"]


def test_a_version_that_another_batch_has_made_is_not_taken_for_this_ones(trainer: Trainer) -> None:
    made = rollouts(trainer.model)
    trainer.update("reused", 0, seal(trainer.storage, "reused", 0, made), RL)
    status = trainer.update("reused", 0, seal(trainer.storage, "reused", 0, made[:4]), RL)
    assert status["state"] == "failed"
    assert "version=000001 was made of another batch" in status["error"]


def test_greedy_answers_are_not_learned_from(trainer: Trainer) -> None:
    status = trainer.update("greedy", 0, seal(trainer.storage, "greedy", 0, rollouts(trainer.model)), RL, temperature=0.0)
    assert (status["state"], status["retryable"]) == ("failed", False)
    assert "temperature is 0" in status["error"]


def test_a_version_cannot_be_made_out_of_one_that_does_not_exist(trainer: Trainer) -> None:
    status = trainer.update("gap", 3, seal(trainer.storage, "gap", 3, rollouts(trainer.model)), RL)
    assert "run gap has no version 3" in status["error"]


def test_without_the_token_nothing_is_done(trainer: Trainer) -> None:
    trainer_without = type(trainer.http)(base_url=trainer.server.url)
    assert trainer_without.get("/updates/agree/0").status_code == 401


def test_a_trainer_that_was_killed_goes_on_from_its_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    with trainer_server(tmp_path, tiny_model) as first:
        made = rollouts(tiny_model)
        manifests = [seal(first.storage, "killed", number, made) for number in range(2)]
        uninterrupted = [seal(first.storage, "whole", number, made) for number in range(2)]
        for run, paths in (("whole", uninterrupted), ("killed", manifests[:1])):
            for number, path in enumerate(paths):
                assert first.update(run, number, path, RL)["state"] == "finished"
        first.put("killed", 1, manifests[1], RL)
        first.server.kill()
        assert not first.storage.exists("runs/killed/versions/version=000002/manifest.json")
    with trainer_server(tmp_path, tiny_model) as second:
        assert second.get("killed", 1)["state"] == "absent"
        assert second.update("killed", 1, manifests[1], RL)["state"] == "finished"
        assert distance(weights(second, "whole", 2), weights(second, "killed", 2)) < 1e-6
