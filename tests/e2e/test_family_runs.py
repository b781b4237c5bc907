"""Whole runs of architectures with windows, chunks, sinks, experts, recurrences and stretched angles.

All sequences of the runs are longer than the windows and chunks.
"""

import time
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.models.weight_files import stored_tensors
from tandem.offline.export import export_checkpoint
from tandem.protocol import DataProto, Ragged
from tests.e2e.shop import finish, start
from tests.engines.train.synthetic import output
from tests.support.families import FAMILIES, WINDOW, make_family
from tests.support.marks import slow_but
from tests.support.runs import REWARD_HEAD, assert_same
from tests.support.school import school
from tests.support.words import words as full_words

__all__ = ["school"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(480)]

IN_ROWS = ("lfm2", "qwen3_next")
"""Architectures whose sequences have rows of their own. The native engine does not sample from them."""
ADAPTED_EXPERTS = ("gpt_oss", "glm4_moe", "qwen3_next")
CROSSING = "phi3 crossing"
"""A model whose responses grow beyond the limit of longrope, LIMIT tokens."""
LIMIT = 12
SLOW_LETTERS = f"import time\n{REWARD_HEAD}\n    time.sleep(0.02)\n    return len(set(solution_str)) / 6\n"
BALANCED = "M.mixture.router_aux_loss_coef=0.01 M.mixture.router_z_loss_coef=0.001"
BIASED = f"{BALANCED} M.mixture.router_bias_update_rate=0.01"
ROUTERS = {"qwen3_moe": BALANCED, "mixtral": BALANCED, "deepseek_v3": BIASED, "glm4_moe": BIASED}
"""Architectures whose routers are balanced, and how."""
RUNS = list(dict.fromkeys([*FAMILIES, *ROUTERS]))
WITH_EXPERTS = ("gpt_oss", *ROUTERS, "qwen3_next")
"""Architectures whose experts can be divided."""
DIVISIONS = {
    "shards": "",
    "layers": "A.fsdp_config.tensor_parallel_size=2",
    "experts": "A.fsdp_config.expert_parallel_size=2",
    "experts by four": "A.fsdp_config.expert_parallel_size=4 trainer.n_gpus_per_node=4",
}
LEARNT = ("reward/mean", "actor/loss", "actor/entropy", "actor/grad_norm")

every_family = pytest.mark.parametrize("family", slow_but(["gpt_oss", "deepseek_v3"], RUNS))
each_family = pytest.mark.parametrize("family", RUNS)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a function from the name of a family to the folder of a random model."""
    folder = tmp_path_factory.mktemp("families")

    def of(family: str) -> Path:
        changes = {"original_max_position_embeddings": LIMIT} if family == CROSSING else {}
        return make_family(folder / family, family.split()[0], **changes)

    return cache(of)


@pytest.fixture(scope="module")
def words(lab, model):
    """Return a function from the name of a family to the words of its run by GRPO."""

    def of(family: str) -> list[str]:
        engine = "hf" if family in IN_ROWS else "native"
        return full_words(
            f"M.path={model(family)} R.name={engine} data.max_response_length=24 trainer.save_freq=1 steps=3",
            ROUTERS.get(family, ""),
            lab.reward(SLOW_LETTERS),
        )

    return of


@pytest.fixture(scope="module")
def whole(lab, words):
    """Return a function from the name of a family to its run in one process without interruption."""
    return cache(lambda family: lab.run(f"{family} whole", *words(family)))


def check_export(engine, run: Path, out: Path, tokens: list[torch.Tensor]) -> None:
    """Compare the weights and log-probs of an engine with those of the exported model in transformers."""
    exported = AutoModelForCausalLM.from_pretrained(export_checkpoint(run, out))
    written, own = stored_tensors(exported), dict(engine.weights())
    assert all(torch.equal(own[name], value) for name, value in written.items())
    found = output(engine, DataProto({"tokens": Ragged.from_list(tokens)}))
    start = 0
    for row in tokens:
        with torch.no_grad():
            log_probs = exported(row[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
        wanted = log_probs.gather(1, row[1:, None])[:, 0]
        own = found.values[start + 1 : start + len(row)].double()
        torch.testing.assert_close(own, wanted, rtol=0, atol=2e-5)
        start += len(row)


def check_rollout(run) -> list[torch.Tensor]:
    """Check that training and rollout agree in sequences that exceed the window, and return sequences."""
    for row in run.rows:
        assert row["rollout/log_prob_diff_max"] < 1e-4 and row["actor/grad_norm"] > 0.01
    tokens = [torch.tensor(each) for each in run.samples(3)["tokens"]]
    assert max(map(len, tokens)) > 3 * WINDOW
    return tokens[:6]


@every_family
def test_a_policy_learns_from_its_rollouts_and_is_exported(whole, tmp_path, family):
    run = whole(family)
    check_export(run.actor.actor, run.folder, tmp_path / "out", check_rollout(run))


@pytest.mark.slow
def test_responses_that_cross_the_limit_of_longrope(whole, model, tmp_path):
    """The rollout's angles are those of the sequence before each token, training's those of the whole."""
    run, beginning = whole(CROSSING), AutoModelForCausalLM.from_pretrained(model(CROSSING))
    crossed = 0
    for tokens, mask, log_probs in run.each(1, "tokens", "response_mask", "rollout_log_probs"):
        row, written = torch.tensor([tokens]), torch.tensor(mask[1:]).bool()
        with torch.no_grad():
            logits = beginning(row[:, :-1], use_cache=False).logits[0]
            logits[:LIMIT] = beginning(row[:, :-1][:, :LIMIT], use_cache=False).logits[0]
        wanted = logits.log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
        found = torch.tensor(log_probs)[1:]
        torch.testing.assert_close(found[written], wanted[written], rtol=0, atol=2e-5, check_dtype=False)
        crossed += mask.index(True) < LIMIT < len(tokens)
    assert crossed > 4 and all(row["actor/grad_norm"] > 0.01 for row in run.rows)
    tokens = [torch.tensor(each) for each in run.samples(3)["tokens"]]
    check_export(run.actor.actor, run.folder, tmp_path / "out", tokens[:6])


@pytest.mark.parametrize("family", slow_but(["deepseek_v3"], [*RUNS, CROSSING]))
def test_a_killed_run_goes_on_as_if_nothing_had_happened(lab, words, whole, family):
    name = f"{family} killed"
    folder = lab.folder / name
    process = start([*lab.overrides(folder), *words(family)], lab.folder)
    while not (folder / "checkpoints" / "step_000001").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.kill()
    assert finish(process).returncode == -9
    resumed = lab.run(name, *words(family))
    assert any("resumed" in sentence for sentence in resumed.said), resumed.said
    assert_same(resumed, whole(family))


@every_family
def test_adapters_learn_and_are_merged(lab, words, tmp_path, family):
    adapters = "M.lora_rank=4 M.lora_alpha=8 M.mixture.router_bias_update_rate=0"
    more = "M.target_parameters=[experts.gate_up_proj,experts.down_proj]" if family in ADAPTED_EXPERTS else ""
    run = lab.run(f"{family} adapters", *words(family), adapters, more)
    check_export(run.actor.actor, run.folder, tmp_path / "out", check_rollout(run))


@pytest.mark.slow
@pytest.mark.parametrize("family", ROUTERS)
def test_a_critic_is_a_mixture_too(lab, words, family):
    run = lab.run(f"{family} critic", *words(family), "GAE", ROUTERS[family].replace("M.", "critic.model."))
    check_rollout(run)
    losses = [(row["critic/router/loss"], row["router/loss"]) for row in run.rows]
    assert losses[0][0] == pytest.approx(losses[0][1]) and losses[-1][0] != losses[-1][1]
    assert all(row["critic/grad_norm"] > 0.01 for row in run.rows)


@pytest.mark.slow
@each_family
def test_fine_tuning(school, model, tmp_path, family):
    routers = ROUTERS.get(family, "").replace("M.", "model.")
    run = school.run("sft", family, f"model.path={model(family)} {routers} trainer.save_freq=2 steps=2")
    first, second = run.rows[-2:]
    assert second["sft/loss"] < first["sft/loss"]
    draw = torch.Generator().manual_seed(0)
    tokens = [torch.randint(3, 46, (length,), generator=draw) for length in (1, 9, 30)]
    check_export(run.engine, run.folder, tmp_path / "out", tokens)


CELLS = [
    (family, name)
    for family in RUNS
    for name in DIVISIONS
    if not (family in IN_ROWS and name == "layers")
    and (family in {"experts": WITH_EXPERTS, "experts by four": ROUTERS}.get(name, RUNS))
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "division"), CELLS)
def test_ranks_on_ray_learn_the_same(lab, words, whole, ray_cluster, family, division):
    name = f"{family} {division}"
    run = lab.run(name, *words(family), "trainer.n_gpus_per_node=2 trainer.device=cpu", DIVISIONS[division])
    for got, wanted in zip(run.rows, whole(family).rows, strict=True):
        assert got["rollout/log_prob_diff_max"] < 1e-4
        assert {n: got[n] for n in LEARNT} == pytest.approx(
            {n: wanted[n] for n in LEARNT}, rel=1e-4, abs=1e-5
        )
