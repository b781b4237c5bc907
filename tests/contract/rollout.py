"""The contract of every rollout engine, a suite for subclasses with a fixture `kind` of scope "class"."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from tandem.engines.rollout.base import RolloutEngine, finished, generate
from tandem.engines.weight_sync import digest
from tandem.errors import EngineError
from tandem.protocol import Request, Sample, SamplingParams
from tests.contract import world as worlds
from tests.contract.reference import distribution
from tests.contract.world import EOS, MAX_LENGTH, PARAMS, log_probs, logits_of, prompt, requests_of

STATS = {"generated_tokens", "prefill_tokens", "decode_steps", "peak_running", "cache_bytes", "preemptions"}
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=20)
BAD = {
    "too long": ({"prompt_ids": np.ones(90, dtype=np.int64)}, "90 \\+ 8 = 98 tokens"),
    "empty": ({"prompt_ids": np.zeros(0, dtype=np.int64)}, "empty"),
    "unknown token": ({"prompt_ids": np.array([3, 97])}, "97"),
    "negative token": ({"prompt_ids": np.array([3, -1])}, "-1"),
    "unknown biased token": ({"params": SamplingParams(max_tokens=8, logit_bias=((97, 1.0),))}, "97"),
    "duplicate": ({"sample": 0}, "already"),
}


def tokens_of(samples: list[Sample]) -> dict[tuple[str, int], list[int]]:
    return {sample.id: sample.token_ids.tolist() for sample in samples}


def rest_of(engine: RolloutEngine) -> list[Sample]:
    samples: list[Sample] = []
    while engine.pending():
        samples += engine.poll(0.5)
    return samples


class RolloutContract:
    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("contract")
        module, tokenizer = worlds.make_model(11), worlds.make_tokenizer()
        module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return worlds.World(module, worlds.make_model(12), folder, tokenizer)

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls, kind, world):
        engine = kind.make(world, max_length=MAX_LENGTH, max_num_seqs=64)
        assert isinstance(engine, RolloutEngine)
        yield engine
        engine.close()
        engine.close()  # a second call does nothing

    @pytest.fixture
    def engine(self, kind, shared, world):
        assert shared.pending() == 0, "the test before left requests"
        if kind.source is not None:
            shared.update_weights(kind.source(world.module), 0)
        shared.stats()
        return shared

    @pytest.fixture(scope="class")
    @classmethod
    def written(cls, kind, shared, world):
        if kind.source is not None:
            shared.update_weights(kind.source(world.module), 0)
        requests = {name: requests_of(params, 3, 2, name) for name, params in PARAMS.items()}
        samples = iter(generate(shared, [request for group in requests.values() for request in group]))
        return {name: [(request, next(samples)) for request in group] for name, group in requests.items()}

    @pytest.mark.parametrize("name", PARAMS)
    def test_tokens_and_log_probs_follow_the_reference(self, kind, world, written, name):
        for request, sample in written[name]:
            worlds.check_sample(kind, world.module, request, sample)
            assert set(sample.versions.tolist()) == {0}

    def test_the_cases_show_what_they_are_for(self, written):
        for name in ("presence", "frequency", "rewarded"):
            assert any(len(set(s.token_ids.tolist())) < len(s.token_ids) for _, s in written[name])
        stopped = [len(s.token_ids) for _, s in written["min_tokens"] if s.finish_reason == "stop"]
        assert stopped and min(stopped) > 8

    def test_first_tokens_have_the_stated_probabilities(self, kind, world, engine):
        params = SamplingParams(temperature=1.2, top_p=0.95, min_p=0.01, max_tokens=1, seed=5)
        requests = [Request("many", i, prompt(1), params) for i in range(600)]
        samples = generate(engine, requests)
        counts = np.bincount([s.token_ids[0] for s in samples], minlength=worlds.VOCABULARY)
        [logits] = logits_of(world.module, requests[0], samples[0].token_ids)
        expected = kind.distribution(logits, params).probabilities * len(samples)
        assert counts[expected == 0].sum() == 0
        often = expected >= 5
        rest = (expected > 0) & ~often
        seen, wanted = (np.append(each[often], each[rest].sum()) for each in (counts, expected))
        assert len(seen) > 8
        assert stats.chisquare(seen, wanted).pvalue > 1e-4

    def test_neither_company_nor_order_changes_a_sample(self, kind, world, engine):
        names = ("plain", "top_p", "everything", "rewarded", "min_tokens")
        requests = [request for name in names for request in requests_of(PARAMS[name], 2, 2, name)]
        expected = tokens_of(generate(engine, requests))
        order = np.random.default_rng(2).permutation(len(requests))
        assert tokens_of(generate(engine, [requests[i] for i in order])) == expected
        for request in requests[::3]:
            assert tokens_of(generate(engine, [request])) == {request.id: expected[request.id]}
        if kind.keyed:
            small = kind.make(world, max_length=MAX_LENGTH, max_num_seqs=2, max_num_batched_tokens=8)
            with closing(small):
                small.update_weights(kind.source(world.module), 0)
                assert tokens_of(generate(small, requests)) == expected
        assert len({tuple(tokens) for tokens in expected.values()}) == len(requests)
        seeded = [replace(r, params=replace(r.params, seed=77)) for r in requests[:4]]
        assert all(expected[id] != tokens for id, tokens in tokens_of(generate(engine, seeded)).items())

    def test_a_stop_token_ends_and_is_kept(self, engine):
        requests = requests_of(GREEDY, 4)
        before = generate(engine, requests)
        cut = [
            replace(request, params=replace(GREEDY, stop_token_ids=(EOS, int(sample.token_ids[6]))))
            for request, sample in zip(requests, before, strict=True)
        ]
        for request, long, short in zip(cut, before, generate(engine, cut), strict=True):
            first = next(i for i, t in enumerate(long.token_ids) if t in request.params.stop_token_ids)
            assert short.token_ids.tolist() == long.token_ids[: first + 1].tolist()
            assert short.finish_reason == "stop"

    def test_only_what_the_request_names_ends_it(self, engine):
        params = {"logit_bias": ((EOS, 50.0),), "max_tokens": 6}
        for more, count, reason in (
            ({}, 6, "length"),
            ({"stop_token_ids": (EOS,)}, 1, "stop"),
            ({"stop_token_ids": (EOS,), "min_tokens": 3}, 4, "stop"),
        ):
            [sample] = generate(engine, requests_of(SamplingParams(**params, **more), 1))
            assert (len(sample.token_ids), sample.finish_reason) == (count, reason)
            barred = more.get("min_tokens", 0)
            assert [token == EOS for token in sample.token_ids] == [i >= barred for i in range(count)]

    @pytest.mark.parametrize("response", [1, 4, MAX_LENGTH - 4])
    def test_a_sequence_may_have_the_whole_length(self, engine, response):
        params = SamplingParams(max_tokens=response)
        [sample] = generate(engine, [Request("whole", 0, prompt(3, MAX_LENGTH - response), params)])
        assert (len(sample.token_ids), sample.finish_reason) == (response, "length")

    def test_a_stop_string_ends_and_is_kept(self, world, engine):
        """It may span tokens; one that ends within the first min_tokens, or in the prompt, does not count."""
        [request] = requests_of(GREEDY, 1)
        ids = generate(engine, [request])[0].token_ids.tolist()
        text = world.decode(ids[5:8])
        end = next(n for n in range(1, 21) if text in world.decode(ids[:n]))

        def length(**changes):
            [sample] = generate(engine, [replace(request, params=replace(GREEDY, **changes))])
            assert sample.token_ids.tolist() == ids[: len(sample.token_ids)]
            return len(sample.token_ids), sample.finish_reason

        never = world.decode([EOS - 1] * 5)
        assert length(stop=(never, text)) == length(stop=(text,), min_tokens=end - 1) == (end, "stop")
        asked = world.decode(request.prompt_ids[-3:].tolist())
        assert length(stop=(never,)) == length(stop=(asked,)) == (20, "length")
        again = world.decode(ids[:end]).rfind(text)
        assert length(stop=(text,), min_tokens=end)[0] > end > again

    def test_every_sample_comes_once_whichever_way_it_is_waited_for(self, engine):
        requests = requests_of(SamplingParams(max_tokens=5), 8, 2)
        ids = [request.id for request in requests]
        engine.submit(requests)
        assert engine.pending() == 16
        assert sorted(sample.id for sample in rest_of(engine)) == sorted(ids)
        assert engine.poll(0.0) == []
        parts = list(finished(engine, requests, at_least=3))
        assert all(len(part) >= 3 for part in parts[:-1])
        assert sorted(sample.id for part in parts for sample in part) == sorted(ids)
        assert list(finished(engine, [])) == []
        assert [sample.id for sample in generate(engine, requests)] == ids

    def test_who_stops_reading_leaves_nothing_pending(self, engine):
        long = requests_of(SamplingParams(max_tokens=60), 6, 16)
        parts = finished(engine, requests_of(SamplingParams(max_tokens=2), 1, name="short") + long)
        next(parts)
        parts.close()
        assert engine.pending() == 0
        engine.poll(0.0)

    def test_aborted_requests_leave_with_or_without_what_they_wrote(self, kind, world, engine):
        long = requests_of(SamplingParams(max_tokens=60), 40, 2, name="long")
        start = engine.progress()
        engine.submit(requests_of(SamplingParams(max_tokens=2), 1, name="short") + long)
        done = set()
        while engine.progress() == start:
            done |= {sample.id for sample in engine.poll(0.01)}
        left = [request for request in long if request.id not in done]
        kept, dropped, last = left[0], left[1], left[-1]
        partial = engine.abort([kept.id, last.id, ("unknown", 0)], keep_partial=True)
        assert [sample.id for sample in partial] == [kept.id, last.id]
        for request, sample in zip((kept, last), partial, strict=True):
            assert sample.finish_reason == ("abort" if len(sample.token_ids) < 60 else "length")
            if len(sample.token_ids):
                worlds.check_sample(kind, world.module, request, sample)
        assert engine.abort([dropped.id]) == []
        engine.submit([kept])
        engine.abort([request.id for request in left[2:-3]])
        after = tokens_of(rest_of(engine))
        assert len(after[kept.id]) == 60
        if kind.seeded:
            assert after[kept.id][: len(partial[0].token_ids)] == partial[0].token_ids.tolist()
        assert dropped.id not in after and last.id not in after
        assert {request.id for request in left[-3:-1]} <= set(after)

    @pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
    def test_bad_requests_are_refused_whole(self, engine, change, message):
        good = Request("a", 0, np.array([1, 2]), SamplingParams(max_tokens=8))
        with pytest.raises(EngineError, match=message):
            engine.submit([good, replace(good, **{"sample": 1, **change})])
        assert engine.pending() == 0
        engine.submit([good])
        with pytest.raises(EngineError, match="already"):
            engine.submit([good])
        engine.abort([good.id])

    def test_new_weights_change_results_and_stamps_and_old_prefixes_are_forgotten(self, kind, world, engine):
        if kind.source is None:
            assert engine.takes == frozenset()
            with pytest.raises(EngineError, match="cannot give"):
                engine.update_weights(None, 1)
            return
        params = SamplingParams(temperature=0.0, max_tokens=6)
        requests = [Request(f"p{i}", 0, prompt(i, 40), params) for i in range(3)]
        before = tokens_of(generate(engine, requests))
        assert engine.update_weights(kind.source(world.other), 5) == digest(world.other.named_parameters())
        after = generate(engine, requests)
        for request, sample in zip(requests, after, strict=True):
            worlds.check_sample(kind, world.other, request, sample)
            assert sample.versions.tolist() == [5] * 6
        assert before != tokens_of(after)

    def test_sequences_that_run_go_on_under_new_weights(self, kind, world, engine):
        if kind.source is None:
            pytest.skip("its weights cannot be changed")
        requests = requests_of(SamplingParams(max_tokens=40), 40, 2)
        start = engine.progress()
        engine.submit(requests)
        samples = []
        while engine.progress() == start:
            samples += engine.poll(0.01)
        engine.update_weights(kind.source(world.other), 1)
        samples = {sample.id: sample for sample in samples + rest_of(engine)}
        assert samples.keys() == {request.id for request in requests}
        seen = set()
        for request in requests:
            sample = samples[request.id]
            old = int((sample.versions == 0).sum())
            seen |= set(sample.versions.tolist())
            assert sample.versions.tolist() == [0] * old + [1] * (40 - old)
            if kind.recomputes is not None:
                before = log_probs(world.module, request, sample)[:old]
                np.testing.assert_allclose(sample.log_probs[:old], before, atol=kind.tolerance, rtol=0)
            if kind.recomputes or not old:
                after = log_probs(world.other, request, sample)[old:]
                np.testing.assert_allclose(sample.log_probs[old:], after, atol=kind.tolerance, rtol=0)
        assert seen == {0, 1}

    def test_sleep_needs_an_idle_engine_and_wake_brings_it_back(self, kind, world, engine):
        requests = requests_of(SamplingParams(temperature=0.0, max_tokens=6), 3)
        before = tokens_of(generate(engine, requests))
        engine.submit(requests)
        with pytest.raises(EngineError, match="pending"):
            engine.sleep()
        rest_of(engine)
        engine.sleep(("kv_cache",))
        engine.wake(("kv_cache",))
        assert tokens_of(generate(engine, requests)) == before
        if kind.source is None:
            return
        engine.sleep()
        engine.wake()
        with pytest.raises(EngineError):  # the weights do not come back by themselves
            generate(engine, requests)
        engine.update_weights(kind.source(world.module), 3)
        after = generate(engine, requests)
        assert tokens_of(after) == before
        assert after[0].versions.tolist() == [3] * 6
        engine.sleep()
        engine.update_weights(kind.source(world.module), 4)  # this also wakes the engine
        assert tokens_of(generate(engine, requests)) == before

    def test_stats_count_and_start_anew_and_progress_goes_on(self, engine):
        requests = requests_of(SamplingParams(max_tokens=5), 6)
        start = engine.progress()
        generate(engine, requests)
        assert engine.progress() - start == 30
        counted = engine.stats()
        assert set(counted) >= STATS
        assert (counted["generated_tokens"], counted["preemptions"]) == (30, 0)
        assert counted["prefill_tokens"] <= sum(len(request.prompt_ids) for request in requests)
        assert 1 <= counted["peak_running"] <= 6 and counted["decode_steps"] >= 4
        again = engine.stats()
        assert not any(again[name] for name in ("generated_tokens", "prefill_tokens", "decode_steps"))
        assert engine.progress() - start == 30

    def test_logprobs_modes(self, kind, world):
        penalties = {"repetition_penalty": 1.4, "logit_bias": ((5, 2.0),)}
        params = SamplingParams(temperature=0.7, top_k=20, max_tokens=6, seed=3, **penalties)
        requests, written = requests_of(params, 3), []
        for mode in kind.modes:
            engine = kind.make(world, max_length=MAX_LENGTH, max_num_seqs=4, logprobs_mode=mode)
            with closing(engine):
                if kind.source is not None:
                    engine.update_weights(kind.source(world.module), 0)
                samples = generate(engine, requests)
            written.append(tokens_of(samples))
            assert written[-1] == written[0]
            for request, sample in zip(requests, samples, strict=True):
                rows = logits_of(world.module, request, sample.token_ids)
                for t, (token, logits) in enumerate(zip(sample.token_ids, rows, strict=True)):
                    before = sample.token_ids[:t].tolist()
                    at = distribution(logits, params, request.prompt_ids.tolist(), before)
                    expected = {
                        "processed_logprobs": np.log(at.probabilities[token]),
                        "raw_logprobs": logits[token] - np.log(np.exp(logits).sum()),
                        "processed_logits": at.logits[token],
                        "raw_logits": logits[token],
                    }[mode]
                    assert sample.log_probs[t] == pytest.approx(expected, abs=kind.tolerance), mode
