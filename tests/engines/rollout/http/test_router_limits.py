"""Tests of a router with more requests than it can assign, and with a request that every replica refuses."""

from __future__ import annotations

import time

import pytest

from tandem.engines.rollout.base import generate
from tandem.engines.rollout.http.connection import Refused, Server
from tandem.engines.rollout.http.openai import OpenAIEngine
from tests.engines.rollout.http.fakes import FakeOpenAI
from tests.engines.rollout.http.test_router import Recorder, request, router_of


def test_many_waiting_requests_cost_a_poll_nothing():
    """While the replicas are full, none of 100,000 waiting requests is examined.

    When a replica has free capacity, only a few are examined.
    """
    first, second = Recorder(), Recorder()
    router = router_of([first, second], window=4)
    router.submit([request(f"u{i}") for i in range(100_000)])
    router.poll(0)
    began = time.process_time()
    for _ in range(30):
        router.poll(0)
    assert time.process_time() - began < 0.3
    began = time.process_time()
    for _ in range(10):
        first.finish(next(iter(first.held)))
        assert len(router.poll(0)) == 1  # then the next request takes its place
    assert time.process_time() - began < 2


def test_one_refused_request_costs_no_replica():
    requests = [request(f"u{i}", prompt=3 + i, new=30) for i in range(4)]
    with FakeOpenAI() as one, FakeOpenAI() as two:
        engines = [OpenAIEngine(Server(fake.url), max_length=256, max_num_seqs=4) for fake in (one, two)]
        router = router_of(engines, window=5)
        for engine in engines:
            engine.submit([])  # connects
        one.faults.append("400")
        with pytest.raises(Refused, match="refused") as caught:
            generate(router, requests)
        assert "400 as planned" in str(caught.value.got)
        assert router.pending() == 0
        assert len(generate(router, requests)) == 4
        assert len(one.bodies("/v1/completions")) > 3  # it still gets its share
        router.close()
