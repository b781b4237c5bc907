"""The contract of every rollout engine.

A test module uses the suite with a subclass:

    class TestMine(RolloutContract):
        @pytest.fixture(scope="class", params=[EngineKind("mine", make, source)], ids=str)
        @classmethod
        def kind(cls, request):
            return request.param

One engine serves all tests of a class. Tests that need other options create their own engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tandem.engines.rollout.base import RolloutEngine, finished, generate
from tandem.engines.weight_sync import digest
from tandem.errors import EngineError
from tandem.protocol import Request, Sample, SamplingParams
from tests.contract.reference import distribution
from tests.contract.world import (
    EOS,
    MAX_LENGTH,
    PARAMS,
    STATS,
    VOCABULARY,
    EngineKind,
    World,
    check_sample,
    logits_of,
    make_model,
    make_tokenizer,
    prompt,
    requests_of,
)


class RolloutContract:
    """The test suite. A subclass defines the fixture `kind`."""

    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, tmp_path_factory: pytest.TempPathFactory) -> World:
        folder = tmp_path_factory.mktemp("contract")
        module, tokenizer = make_model(11), make_tokenizer()
        module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return World(module, make_model(12), folder, tokenizer)

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls, kind: EngineKind, world: World) -> Iterator[RolloutEngine]:
        engine = kind.make(world, **{"max_length": MAX_LENGTH, "max_num_seqs": 64, **kind.options})
        yield engine
        engine.close()
        engine.close()  # a second call does nothing

    @pytest.fixture
    def engine(self, kind: EngineKind, shared: RolloutEngine, world: World) -> RolloutEngine:
        """Return an idle engine with the module of the world and counters at zero."""
        assert shared.pending() == 0, "the test before left requests"
        if kind.source is not None:
            shared.update_weights(kind.source(world.module), 0)
        shared.stats()
        return shared

    @pytest.fixture(scope="class")
    @classmethod
    def written(
        cls, kind: EngineKind, shared: RolloutEngine, world: World
    ) -> dict[str, list[tuple[Request, Sample]]]:
        """Return samples of all sampling parameters, generated together."""
        if kind.source is not None:
            shared.update_weights(kind.source(world.module), 0)
        requests = {name: requests_of(params, 3, 2, name) for name, params in PARAMS.items()}
        samples = iter(generate(shared, [request for group in requests.values() for request in group]))
        return {name: [(request, next(samples)) for request in group] for name, group in requests.items()}

    def test_is_an_engine(self, engine: RolloutEngine) -> None:
        assert isinstance(engine, RolloutEngine)

    @pytest.mark.parametrize("name", PARAMS)
    def test_tokens_and_log_probs_follow_the_reference(
        self,
        kind: EngineKind,
        world: World,
        written: dict[str, list[tuple[Request, Sample]]],
        name: str,
    ) -> None:
        stops = set(PARAMS[name].stop_token_ids)
        for request, sample in written[name]:
            check_sample(kind, world.module, request, sample)
            stopped = int(sample.token_ids[-1]) in stops and len(sample.token_ids) > PARAMS[name].min_tokens
            assert sample.finish_reason == ("stop" if stopped else "length")
            assert not stops & set(sample.token_ids[:-1].tolist())
            assert stopped or len(sample.token_ids) == request.params.max_tokens
            assert sample.versions.tolist() == [0] * len(sample.token_ids)

    def test_the_cases_show_what_they_are_for(self, written: dict[str, list[tuple[Request, Sample]]]) -> None:
        """Tokens repeat in the cases with penalties, and some but not all samples stop early."""
        for name in ("presence", "frequency", "rewarded"):
            assert any(len(set(s.token_ids.tolist())) < len(s.token_ids) for _, s in written[name])
        assert {s.finish_reason for _, s in written["min_tokens"]} >= {"stop"}
        assert all(len(s.token_ids) > 8 for _, s in written["min_tokens"] if s.finish_reason == "stop")

    def test_first_tokens_have_the_stated_probabilities(
        self, kind: EngineKind, world: World, engine: RolloutEngine
    ) -> None:
        params = SamplingParams(temperature=1.2, top_p=0.95, min_p=0.01, max_tokens=1, seed=5)
        requests = [Request("many", i, prompt(1), params) for i in range(600)]
        samples = generate(engine, requests)
        counts = np.bincount([s.token_ids[0] for s in samples], minlength=VOCABULARY)
        [logits] = logits_of(world.module, requests[0], samples[0].token_ids)
        expected = distribution(logits, params).probabilities * len(samples)
        assert counts[expected == 0].sum() == 0
        often = expected >= 5
        rest = (expected > 0) & ~often
        seen = np.append(counts[often], counts[rest].sum())
        wanted = np.append(expected[often], expected[rest].sum())
        assert len(seen) > 8
        assert stats.chisquare(seen, wanted).pvalue > 1e-4

    def test_neither_company_nor_order_changes_a_sample(
        self, kind: EngineKind, world: World, engine: RolloutEngine
    ) -> None:
        """A sample has the same tokens alone, in another order, two at a time, and in small steps.

        Seed, uid and sample index change its tokens.
        """
        if not kind.keyed:
            pytest.skip("draws by a generator of its own")
        requests = [
            request
            for name in ("plain", "top_p", "everything", "rewarded", "min_tokens")
            for request in requests_of(PARAMS[name], 2, 2, name)
        ]
        expected = {s.id: s.token_ids.tolist() for s in generate(engine, requests)}
        order = np.random.default_rng(2).permutation(len(requests))
        permuted = generate(engine, [requests[i] for i in order])
        assert {s.id: s.token_ids.tolist() for s in permuted} == expected
        alone = [generate(engine, [request])[0] for request in requests[::3]]
        assert all(s.token_ids.tolist() == expected[s.id] for s in alone)
        small = kind.make(world, max_length=MAX_LENGTH, max_num_seqs=2, max_num_batched_tokens=8)
        with closing(small):
            small.update_weights(kind.source(world.module), 0)  # type: ignore[misc]
            assert {s.id: s.token_ids.tolist() for s in generate(small, requests)} == expected
        assert len({tuple(tokens) for tokens in expected.values()}) == len(requests)
        seeded = [replace(r, params=replace(r.params, seed=77)) for r in requests[:4]]
        assert all(s.token_ids.tolist() != expected[s.id] for s in generate(engine, seeded))

    def test_the_samples_of_a_prompt_differ(self, engine: RolloutEngine) -> None:
        requests = requests_of(SamplingParams(max_tokens=8), 2, 4)
        samples = generate(engine, requests)
        assert [s.id for s in samples] == [r.id for r in requests]
        assert len({tuple(s.token_ids.tolist()) for s in samples}) == len(requests)

    def test_a_stop_token_ends_and_is_kept(self, engine: RolloutEngine) -> None:
        full = SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=20)
        before = generate(engine, requests_of(full, 4))
        cut = [
            replace(r, params=replace(full, stop_token_ids=(EOS, int(s.token_ids[6]))))
            for r, s in zip(requests_of(full, 4), before, strict=True)
        ]
        for request, long, short in zip(cut, before, generate(engine, cut), strict=True):
            first = next(i for i, t in enumerate(long.token_ids) if t in request.params.stop_token_ids)
            assert short.token_ids.tolist() == long.token_ids[: first + 1].tolist()
            assert short.finish_reason == "stop"

    def test_only_what_the_request_names_ends_it(self, engine: RolloutEngine) -> None:
        """The model's own end-of-sequence token is a token like any other."""
        biased = SamplingParams(logit_bias=((EOS, 50.0),), max_tokens=6)
        [sample] = generate(engine, requests_of(biased, 1))
        assert sample.token_ids.tolist() == [EOS] * 6
        assert sample.finish_reason == "length"
        [stopped] = generate(engine, requests_of(replace(biased, stop_token_ids=(EOS,)), 1))
        assert (stopped.token_ids.tolist(), stopped.finish_reason) == ([EOS], "stop")
        barred = replace(biased, stop_token_ids=(EOS,), min_tokens=3)
        [later] = generate(engine, requests_of(barred, 1))
        assert (later.token_ids.tolist().index(EOS), later.finish_reason) == (3, "stop")

    def test_a_stop_string_ends_and_is_kept(self, world: World, engine: RolloutEngine) -> None:
        """A stop string may extend over several tokens.

        A string that never appears or is only in the prompt stops nothing. A string that ends within the
        first min_tokens tokens does not count.
        """
        full = SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=20)
        [request] = requests_of(full, 1)
        [long] = generate(engine, [request])
        ids = long.token_ids.tolist()
        text = world.decode(ids[5:8])
        end = next(n for n in range(1, 21) if text in world.decode(ids[:n]))

        def length(**changes: Any) -> tuple[int, str]:
            [sample] = generate(engine, [replace(request, params=replace(full, **changes))])
            assert sample.token_ids.tolist() == ids[: len(sample.token_ids)]
            return len(sample.token_ids), sample.finish_reason

        never = world.decode([EOS - 1] * 5)
        assert length(stop=(never, text)) == (end, "stop")
        assert length(stop=(never,)) == (20, "length")
        assert length(stop=(world.decode(request.prompt_ids[-3:].tolist()),)) == (20, "length")
        assert length(stop=(text,), min_tokens=end - 1) == (end, "stop")
        again = world.decode(ids[:end]).rfind(text)
        assert length(stop=(text,), min_tokens=end)[0] > end > again

    def test_every_sample_comes_once_whichever_way_it_is_waited_for(self, engine: RolloutEngine) -> None:
        requests = requests_of(SamplingParams(max_tokens=5), 8, 2)
        engine.submit(requests)
        assert engine.pending() == 16
        seen: list[tuple[str, int]] = []
        while engine.pending():
            seen += [sample.id for sample in engine.poll(0.5)]
        assert sorted(seen) == sorted(request.id for request in requests)
        assert engine.poll(0.0) == []
        parts = list(finished(engine, requests, at_least=3))
        assert all(len(part) >= 3 for part in parts[:-1])
        assert sorted(s.id for part in parts for s in part) == sorted(r.id for r in requests)
        assert list(finished(engine, [])) == []

    def test_who_stops_reading_leaves_nothing_pending(self, engine: RolloutEngine) -> None:
        long = requests_of(SamplingParams(max_tokens=60), 6, 16)
        short = requests_of(SamplingParams(max_tokens=2), 1, name="short")
        parts = finished(engine, short + long)
        next(parts)
        parts.close()
        assert engine.pending() == 0
        engine.poll(0.0)

    def test_aborted_requests_leave_with_or_without_what_they_wrote(
        self, kind: EngineKind, world: World, engine: RolloutEngine
    ) -> None:
        short = requests_of(SamplingParams(max_tokens=2), 1, name="short")
        long = requests_of(SamplingParams(max_tokens=60), 40, 2, name="long")
        engine.submit(short + long)
        done = {sample.id for sample in engine.poll(0.0)}
        left = [request for request in long if request.id not in done]
        kept, dropped = left[0], left[1]
        partial = engine.abort([kept.id, ("unknown", 0)], keep_partial=True)
        assert [(sample.id, sample.finish_reason) for sample in partial] == [(kept.id, "abort")]
        assert len(partial[0].token_ids) < 60
        if len(partial[0].token_ids):
            check_sample(kind, world.module, kept, partial[0])
        assert engine.abort([dropped.id]) == []
        engine.submit([replace(kept, params=SamplingParams(max_tokens=3))])
        engine.abort([request.id for request in left[2:-2]])
        after: list[Sample] = []
        while engine.pending():
            after += engine.poll(0.5)
        lengths = {sample.id: len(sample.token_ids) for sample in after}
        assert lengths[kept.id] == 3
        assert dropped.id not in lengths
        assert {request.id for request in left[-2:]} <= set(lengths)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"prompt_ids": np.ones(90, dtype=np.int64)}, "90 \\+ 8 = 98 tokens"),
            ({"prompt_ids": np.zeros(0, dtype=np.int64)}, "empty"),
            ({"prompt_ids": np.array([3, 97])}, "97"),
            ({"prompt_ids": np.array([3, -1])}, "-1"),
            ({"params": SamplingParams(max_tokens=8, logit_bias=((97, 1.0),))}, "97"),
            ({"sample": 0}, "already"),
        ],
        ids=["too long", "empty", "unknown token", "negative token", "unknown biased token", "duplicate"],
    )
    def test_bad_requests_are_refused_whole(
        self, engine: RolloutEngine, change: dict[str, Any], message: str
    ) -> None:
        good = Request("a", 0, np.array([1, 2]), SamplingParams(max_tokens=8))
        bad = replace(good, **{"sample": 1, **change})
        with pytest.raises(EngineError, match=message):
            engine.submit([good, bad])
        assert engine.pending() == 0
        engine.submit([good])
        with pytest.raises(EngineError, match="already"):
            engine.submit([good])
        engine.abort([good.id])

    def test_new_weights_change_results_and_stamps_and_old_prefixes_are_forgotten(
        self, kind: EngineKind, world: World, engine: RolloutEngine
    ) -> None:
        if kind.source is None:
            pytest.skip("its weights cannot be changed")
        params = SamplingParams(temperature=0.0, max_tokens=6)
        requests = [Request(f"p{i}", 0, prompt(i, 40), params) for i in range(3)]
        before = generate(engine, requests)
        assert engine.update_weights(kind.source(world.other), 5) == digest(world.other.named_parameters())
        after = generate(engine, requests)
        for request, sample in zip(requests, after, strict=True):
            check_sample(kind, world.other, request, sample)
            assert sample.versions.tolist() == [5] * 6
        assert [s.token_ids.tolist() for s in before] != [s.token_ids.tolist() for s in after]

    def test_sequences_that_run_go_on_under_new_weights(
        self, kind: EngineKind, world: World, engine: RolloutEngine
    ) -> None:
        if kind.source is None:
            pytest.skip("its weights cannot be changed")
        requests = requests_of(SamplingParams(max_tokens=40), 40, 2)
        engine.submit(requests)
        samples = engine.poll(0.0)
        engine.update_weights(kind.source(world.other), 1)
        while engine.pending():
            samples += engine.poll(0.5)
        assert sorted(s.id for s in samples) == sorted(r.id for r in requests)
        stamps = [s.versions.tolist() for s in samples]
        assert all(len(versions) == 40 and versions == sorted(versions) for versions in stamps)
        assert {version for versions in stamps for version in versions} == {0, 1}

    def test_sleep_needs_an_idle_engine_and_wake_brings_it_back(
        self, kind: EngineKind, world: World, engine: RolloutEngine
    ) -> None:
        requests = requests_of(SamplingParams(temperature=0.0, max_tokens=6), 3)
        before = [s.token_ids.tolist() for s in generate(engine, requests)]
        engine.submit(requests)
        with pytest.raises(EngineError, match="pending"):
            engine.sleep()
        while engine.pending():
            engine.poll(0.5)
        engine.sleep(("kv_cache",))
        engine.wake(("kv_cache",))
        assert [s.token_ids.tolist() for s in generate(engine, requests)] == before
        if kind.source is None:
            return
        engine.sleep()
        engine.wake()
        engine.update_weights(kind.source(world.module), 3)
        after = generate(engine, requests)
        assert [s.token_ids.tolist() for s in after] == before
        assert after[0].versions.tolist() == [3] * 6
        engine.sleep()
        engine.update_weights(kind.source(world.module), 4)  # this also wakes the engine
        assert [s.token_ids.tolist() for s in generate(engine, requests)] == before

    def test_stats_count_and_start_anew_and_progress_goes_on(self, engine: RolloutEngine) -> None:
        requests = requests_of(SamplingParams(max_tokens=5), 6)
        start = engine.progress()
        generate(engine, requests)
        assert engine.progress() - start == 30
        counted = engine.stats()
        assert set(counted) >= STATS
        assert counted["generated_tokens"] == 30
        assert counted["prefill_tokens"] <= sum(len(request.prompt_ids) for request in requests)
        assert 1 <= counted["peak_running"] <= 6
        assert counted["decode_steps"] >= 4
        assert counted["preemptions"] == 0
        assert not any(
            engine.stats()[name] for name in ("generated_tokens", "prefill_tokens", "decode_steps")
        )
        assert engine.progress() - start == 30

    def test_logprobs_modes(self, kind: EngineKind, world: World) -> None:
        """`log_probs` depend on the mode, and the tokens do not."""
        params = SamplingParams(
            temperature=0.7, top_k=20, repetition_penalty=1.4, logit_bias=((5, 2.0),), max_tokens=6, seed=3
        )
        requests = requests_of(params, 3)
        for mode in kind.modes:
            engine = kind.make(world, max_length=MAX_LENGTH, max_num_seqs=4, logprobs_mode=mode)
            with closing(engine):
                if kind.source is not None:
                    engine.update_weights(kind.source(world.module), 0)
                samples = generate(engine, requests)
            for request, sample in zip(requests, samples, strict=True):
                rows = logits_of(world.module, request, sample.token_ids)
                for t, (token, logits) in enumerate(zip(sample.token_ids, rows, strict=True)):
                    at = distribution(
                        logits, params, request.prompt_ids.tolist(), sample.token_ids[:t].tolist()
                    )
                    expected = {
                        "processed_logprobs": np.log(at.probabilities[token]),
                        "raw_logprobs": logits[token] - np.log(np.exp(logits).sum()),
                        "processed_logits": at.logits[token],
                        "raw_logits": logits[token],
                    }[mode]
                    assert sample.log_probs[t] == pytest.approx(expected, abs=kind.tolerance), mode
