"""Policy updates in one process: who made each token, under which weights, over which KV."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from harness.replay import assert_replays
from harness.tiny_model import assert_baseline, drain, tiny_engine, tiny_spec, tiny_weights
from unison.engine.engine import Engine, StepOutput
from unison.engine.guard import VersionState
from unison.ipc.errors import (
    DigestMismatchError,
    StaleVersionError,
    UnknownVersionError,
    VersionBusyError,
    WeightsError,
)
from unison.ipc.types import (
    ErrorReason,
    FinishReason,
    GenerateRequest,
    OnUpdate,
    RequestOutput,
    SamplingParams,
    VersionSpan,
)

PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
PROMPT = tuple(range(20, 38))


def request(name: str, rule: OnUpdate = OnUpdate.FINISH, n: int = 1, pin: int | None = None) -> GenerateRequest:
    return GenerateRequest(name, PROMPT, PARAMS, n, rule, pin)


def steps(engine: Engine, count: int) -> list[StepOutput]:
    outputs = [engine.step() for _ in range(count)]
    engine.check_invariants()
    return outputs


def spans(output: RequestOutput, index: int = 0) -> tuple[VersionSpan, ...]:
    return output.completions[index].versions


# ---- installing


def test_installed_weights_go_live_between_steps_without_a_copy() -> None:
    """V1, V2, P09, P14: label and data change together; the engine reads the caller's own bytes."""
    engine = tiny_engine()
    weights = tiny_weights(engine.spec, 1)
    version = engine.install(weights)
    assert (engine.live_version.ordinal, version.ordinal) == (0, 1)
    engine.step()
    assert engine.live_version == version
    bound = engine._parts.guard.weights_of(1)
    assert bound.layers[0].qkv.data_ptr() == weights["model.layers.0.self_attn.q_proj.weight"].data_ptr()
    assert bound.head.data_ptr() == weights["lm_head.weight"].data_ptr()
    fresh = tiny_engine(1)
    assert engine.run_batch([PROMPT], PARAMS)[0].completions[0].raw_logprobs == (
        fresh.run_batch([PROMPT], PARAMS)[0].completions[0].raw_logprobs
    )
    assert engine.live_version.digest == fresh.live_version.digest


def test_refused_installs_change_nothing() -> None:
    """V1, V5, P13, P17: an old ordinal, a wrong digest, a wrong layout: the old version serves on, untouched."""
    engine = tiny_engine()
    engine.install(tiny_weights(engine.spec, 1), ordinal=5)
    engine.step()
    before, wanted = engine.status(), engine.run_batch([PROMPT], PARAMS)
    weights = tiny_weights(engine.spec, 2)
    with pytest.raises(StaleVersionError):
        engine.install(weights, ordinal=4)
    with pytest.raises(DigestMismatchError, match="publish again"):
        engine.install(weights, ordinal=6, expected="0" * 32)
    with pytest.raises(WeightsError, match="missing"):
        engine.install({name: tensor for name, tensor in weights.items() if "norm" not in name})
    with pytest.raises(WeightsError, match=r"WeightLayout\.pack"):
        scattered = {name: tensor.clone() for name, tensor in weights.items()}
        engine.install(scattered | {"lm_head.weight": scattered["model.embed_tokens.weight"]})
    engine.step()
    assert engine.status().versions == before.versions
    again = engine.run_batch([PROMPT], PARAMS)
    assert again[0].completions == wanted[0].completions


def test_one_changed_byte_changes_the_digest() -> None:
    """V1, P12, P15: the digest covers every byte, of the tied head too."""
    engine = tiny_engine()
    weights = tiny_weights(engine.spec, 1)
    digest = engine._parts.layout.manifest(weights).digest
    weights["model.embed_tokens.weight"].view(torch.uint8)[3, 5] ^= 1
    with pytest.raises(DigestMismatchError):
        engine.install(weights, expected=digest)
    assert engine.live_version.ordinal == 0


def test_retried_install_acts_once() -> None:
    """P29, P38: the same version again is answered quietly, pending or live."""
    engine = tiny_engine()
    weights = tiny_weights(engine.spec, 1)
    version = engine.install(weights, ordinal=1)
    assert engine.install(weights, ordinal=1, expected=version.digest) == version
    engine.step()
    assert engine.install(weights, ordinal=1) == version
    assert engine.stats().num_flips == 1


def test_busy_when_every_version_is_pinned() -> None:
    """V5, P06: with two sets, both in use, a third has to wait; generation goes on."""
    engine = tiny_engine()
    engine.submit(request("old"))
    steps(engine, 3)
    engine.install(tiny_weights(engine.spec, 1))
    engine.submit(request("new"))
    steps(engine, 2)
    with pytest.raises(VersionBusyError):
        engine.install(tiny_weights(engine.spec, 2))
    done = drain(engine)
    assert (spans(done["old"]), spans(done["new"])) == ((VersionSpan(0, 0, 12),), (VersionSpan(1, 0, 12),))
    assert engine.install(tiny_weights(engine.spec, 2)).ordinal == 2
    engine.step()
    assert_baseline(engine)


def test_retired_weights_are_let_go() -> None:
    """P30, P49: after retirement nothing of the engine points at the old tensors; hundred installs hold two sets."""
    engine = tiny_engine()
    references = []
    for seed in range(1, 101):
        weights = tiny_weights(engine.spec, seed % 5)
        references.append(weakref.ref(weights["model.norm.weight"]))
        engine.install(weights)
        engine.step()
        del weights
    gc.collect()
    alive = sum(reference() is not None for reference in references)
    assert alive <= 2
    assert len(engine.versions) == 2


# ---- what a request in flight does


def test_finish_never_mixes_and_two_versions_share_a_step() -> None:
    """V3, V5, P07: requests that started before stay on their version, later ones run on the new one, in one step."""
    engine = tiny_engine()
    engine.submit(request("old", n=2))
    steps(engine, 4)
    engine.install(tiny_weights(engine.spec, 1))
    engine.submit(request("new"))
    steps(engine, 2)
    assert [batch.version for batch in engine._parts.stepper.last_plan.batches] == [0, 1]
    done = drain(engine)
    assert [spans(done["old"], index) for index in (0, 1)] == [(VersionSpan(0, 0, 12),)] * 2
    assert spans(done["new"]) == (VersionSpan(1, 0, 12),)
    for output in done.values():
        assert_replays(engine, output)


def test_a_group_stays_on_one_version() -> None:
    """V5, P45: members of a group that start after the flip run on the group's version."""
    engine = tiny_engine(scheduler={"max_num_seqs": 1})
    engine.submit(request("group", n=3))
    steps(engine, 2)
    engine.install(tiny_weights(engine.spec, 1))
    done = drain(engine)
    assert {completion.versions for completion in done["group"].completions} == {(VersionSpan(0, 0, 12),)}
    assert_replays(engine, done["group"])


def test_carry_keeps_the_kv_and_shows_it() -> None:
    """V3, V4, P46: spans switch at the flip, for tokens and KV; the replay switches weights there and gives the same
    bits."""
    engine = tiny_engine()
    engine.submit(request("a", OnUpdate.CARRY, n=2))
    steps(engine, 5)
    engine.install(tiny_weights(engine.spec, 1))
    output = drain(engine)["a"]
    for completion in output.completions:
        assert completion.versions == (VersionSpan(0, 0, 5), VersionSpan(1, 5, 12))
        assert completion.kv_versions == (VersionSpan(0, 0, 22), VersionSpan(1, 22, 29))
    assert_replays(engine, output)
    again = engine.run_batch([[*PROMPT, *output.completions[0].token_ids]], PARAMS)[0]
    assert again.num_cached_tokens == 0


def test_recompute_rebuilds_the_kv_under_the_new_weights() -> None:
    """V3: tokens keep the versions that made them, the KV is the new version's throughout."""
    engine = tiny_engine()
    engine.submit(request("a", OnUpdate.RECOMPUTE))
    steps(engine, 5)
    engine.install(tiny_weights(engine.spec, 1))
    output = drain(engine)["a"]
    assert spans(output) == (VersionSpan(0, 0, 5), VersionSpan(1, 5, 12))
    assert output.completions[0].kv_versions == (VersionSpan(1, 0, 29),)
    assert_replays(engine, output)


def test_abort_gives_the_partial_result() -> None:
    """R1, P25: the fragment says why it ended, and what has not started runs under the new version."""
    engine = tiny_engine(scheduler={"max_num_seqs": 1})
    engine.submit(request("a", OnUpdate.ABORT))
    engine.submit(request("b", OnUpdate.ABORT))
    steps(engine, 5)
    engine.install(tiny_weights(engine.spec, 1))
    done = drain(engine)
    completion = done["a"].completions[0]
    assert (completion.finish_reason, completion.error) == (FinishReason.ABORTED, ErrorReason.POLICY_UPDATED)
    assert completion.versions == (VersionSpan(0, 0, 5),)
    assert spans(done["b"]) == (VersionSpan(1, 0, 12),)


def test_pinned_requests_outlive_flips() -> None:
    """V5, P45: an evaluation pinned to a version runs on it from start to end while the next goes live."""
    engine = tiny_engine(versions={"max_installed": 3})
    engine.install(tiny_weights(engine.spec, 1))
    engine.step()
    for rule in OnUpdate:
        engine.submit(request(rule.value, rule, pin=0))
    engine.install(tiny_weights(engine.spec, 2))
    steps(engine, 4)
    done = drain(engine)
    assert {spans(output) for output in done.values()} == {(VersionSpan(0, 0, 12),)}


# ---- prefix KV


def test_equal_prompts_around_an_update_share_no_kv() -> None:
    """V4, S26, P01, P02, P03, P04, P05, P06: no hit after the update, with no flush, though requests are busy."""
    engine = tiny_engine(versions={"max_installed": 3})
    first = engine.run_batch([PROMPT], PARAMS)[0]
    assert engine.run_batch([PROMPT], PARAMS)[0].num_cached_tokens == 16
    engine.submit(request("busy"))
    steps(engine, 2)
    engine.install(tiny_weights(engine.spec, 1))
    second = engine.run_batch([PROMPT], PARAMS)[0]
    assert second.num_cached_tokens == 0
    assert spans(second) == (VersionSpan(1, 0, 12),)
    assert second.completions[0].raw_logprobs != first.completions[0].raw_logprobs
    engine.rollback(0)
    third = engine.run_batch([PROMPT], PARAMS)[0]
    assert third.num_cached_tokens == 16
    assert (spans(third), third.completions[0].token_ids) == ((VersionSpan(0, 0, 12),), first.completions[0].token_ids)
    drain(engine)
    for output in (first, second, third):
        assert_replays(engine, output)


def test_retired_versions_leave_the_prefix_index() -> None:
    """V4, P06: blocks of a version that is gone are free at once."""
    engine = tiny_engine()
    engine.run_batch([PROMPT], PARAMS)
    for seed in (1, 2):
        engine.install(tiny_weights(engine.spec, seed))
        engine.step()
    pool = engine._parts.caches.pool
    assert pool.num_free == pool.strategy.num_blocks


# ---- rollback and exclusion


def test_rollback_is_a_flip_while_the_version_is_there() -> None:
    """V5, V1: back to an intact version; ordinals go on growing; one that is gone is said to be gone."""
    engine = tiny_engine()
    engine.install(tiny_weights(engine.spec, 1))
    engine.step()
    engine.rollback(0)
    assert engine.flip() and engine.live_version.ordinal == 0
    assert engine.install(tiny_weights(engine.spec, 2)).ordinal == 2
    assert engine.flip()
    states = {version.version.ordinal: version.state for version in engine.versions}
    assert states == {0: VersionState.RETAINED, 2: VersionState.LIVE}
    with pytest.raises(UnknownVersionError):
        engine.rollback(1)


def test_a_batch_and_an_update_exclude_each_other() -> None:
    """S8, S26, P11: installs from another thread during a batch never show inside it, and go live after it."""
    engine = tiny_engine(scheduler={"max_num_seqs": 2})
    started, outputs = threading.Event(), []

    def generate() -> None:
        started.set()
        outputs.extend(engine.run_batch([PROMPT] * 6, PARAMS, n=2))

    thread = threading.Thread(target=generate)
    thread.start()
    assert started.wait(10)
    engine.install(tiny_weights(engine.spec, 1))
    engine.flip()
    thread.join(60)
    assert not thread.is_alive()
    engine.flip()
    assert engine.live_version.ordinal == 1
    made_by = {span.version for output in outputs for c in output.completions for span in c.versions}
    assert len(made_by) == 1
    assert_baseline(engine)


def test_score_uses_the_version_that_is_to_go_live() -> None:
    """S26: a score asked for after an install is the new version's, and says so."""
    engine = tiny_engine()
    engine.install(tiny_weights(engine.spec, 1))
    scored = engine.score(PROMPT[:4], PROMPT[4:])
    assert scored.version == 1
    assert scored.logprobs == tiny_engine(1).score(PROMPT[:4], PROMPT[4:]).logprobs


def test_untied_head_is_an_own_tensor() -> None:
    """P17: tied or not, the head that serves is the one that was published."""
    spec = tiny_spec(tie_word_embeddings=False)
    engine = tiny_engine(spec=spec)
    weights = tiny_weights(spec, 1)
    engine.install(weights)
    engine.step()
    assert engine._parts.guard.weights_of(1).head.data_ptr() == weights["lm_head.weight"].data_ptr()


def test_kv_that_was_computed_again_is_on_record() -> None:
    """V3: a carried request that is preempted gets its KV anew under the new version; what its earlier tokens were
    drawn over is recorded, and they replay from that."""
    engine = tiny_engine(cache={"num_tokens": 40, "block_size_tokens": 1, "prefix_caching": False})
    long = SamplingParams(max_tokens=24, seed=3, ignore_eos=True)
    engine.submit(GenerateRequest("older", tuple(range(20, 26)), long))
    engine.submit(GenerateRequest("younger", tuple(range(30, 36)), long, on_update=OnUpdate.CARRY))
    for _ in range(6):
        engine.step()
    engine.install(tiny_weights(engine.spec, 1))
    done = drain(engine)
    (younger,) = done["younger"].completions
    assert engine.stats().num_preemptions > 0
    (epoch,) = younger.kv_history
    assert {span.version for span in epoch.kv_versions} == {0, 1} and 0 < epoch.end < len(younger.token_ids)
    assert [span.version for span in younger.kv_versions] == [1]
    assert done["older"].completions[0].kv_history == ()
    assert_replays(engine, done["younger"])
