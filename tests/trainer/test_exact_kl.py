import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tandem.errors import RewardError, TandemError
from tandem.workers.advantage_inputs import reward_components
from tests.support import loop_columns
from tests.support.marks import slow_but
from tests.support.scorers import make_scorer
from tests.support.words import rows

LOSS = "A.use_kl_loss=true A.kl_loss_type=full"
REWARD = "algorithm.use_kl_in_reward=true algorithm.kl_penalty=full"


@pytest.fixture(scope="module")
def reward(lab):
    return f"custom_reward_function.path={loop_columns.write(lab.folder)} custom_reward_function.name=score"


def exact(policy, reference, tokens):
    """Compute Σ p log p/q before each token with transformers' own forward in float64."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        log_p, log_q = (torch.log_softmax(model(ids).logits[0], -1) for model in (policy, reference))
    return [0.0, *(log_p.exp() * (log_p - log_q)).sum(-1)[:-1].tolist()]


@pytest.mark.equation("kl/full")
@pytest.mark.parametrize("where", slow_but(["reward"], ["reward", "loss"]))
def test_the_kl_of_the_second_step_is_that_of_the_first_steps_weights(lab, reward, where):
    words = (REWARD, "algorithm.kl_ctrl.kl_coef=0.3") if where == "reward" else (LOSS,)
    after_one = lab.run(f"one step {where}", *words, reward, "steps=1")
    finished = lab.run(f"two steps {where}", *words, reward)
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(lab.model, dtype=torch.float64) for _ in range(2)
    )
    missing, unexpected = policy.load_state_dict(after_one.weights(), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    means, everything = [], []
    for tokens, mask in finished.each(2, "tokens", "response_mask"):
        kl = [k for k, m in zip(exact(policy, reference, tokens), mask, strict=True) if m]
        means.append(np.mean(kl))
        everything += kl
    found, (first, second) = finished.tokens(2), finished.rows
    assert "ref_hidden" not in found[0]
    if where == "reward":
        assert [token["ref_kl"] for token in found] == pytest.approx(everything, abs=1e-5)
        wanted = [t["token_level_scores"] - 0.3 * kl for t, kl in zip(found, everything, strict=True)]
        assert [token["token_level_rewards"] for token in found] == pytest.approx(wanted, abs=1e-5)
        assert (first["actor/kl_in_reward"], first["actor/kl"]) == (0.0, 0.0)
        assert second["actor/kl_in_reward"] == pytest.approx(np.mean(means), rel=1e-4)
    else:
        assert first["actor/kl"] == 0.0
        assert second["actor/kl"] == pytest.approx(np.mean(everything), rel=1e-4)
    assert np.mean(means) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("words", [LOSS, REWARD], ids=["loss", "reward"])
def test_adapters_are_compared_with_their_base(lab, reward, words):
    finished = lab.run(f"adapted {words}", f"M.lora_rank=4 steps=3 {words}", reward)
    assert set(finished.actor.engines) == {"actor"}
    assert finished.rows[0]["actor/kl"] == 0.0 < finished.rows[2]["actor/kl"]


@pytest.mark.slow
def test_both_terms_at_once_and_several_updates_per_step(lab, reward):
    words = "A.ppo_mini_batch_size=2 A.use_dynamic_bsz=true A.ppo_max_token_len_per_gpu=20"
    finished = lab.run("both", LOSS, REWARD, reward, words)
    first, second = finished.rows
    assert first["actor/kl_in_reward"] == 0.0 < first["actor/kl"]  # the second update starts from the first
    assert 0 < second["actor/kl_in_reward"] < second["actor/kl"] * 10


@pytest.mark.slow
def test_a_users_own_estimator_in_both_places(lab, reward):
    own = lab.folder / "own_kl.py"
    own.write_text("def halved(log_probs, ref_log_probs):\n    return (log_probs - ref_log_probs) / 2\n")
    in_reward = "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.3 algorithm.kl_penalty="
    in_loss = f"A.use_kl_loss=true A.kl_loss_type={own}:halved+"
    finished = lab.run("own kl", reward, f"{in_reward}{own}:halved", in_loss)
    found = finished.tokens(2)
    halves = [(token["old_log_probs"] - token["ref_log_probs"]) / 2 for token in found]
    for token, half in zip(found, halves, strict=True):
        wanted = token["token_level_scores"] - 0.3 * half
        assert token["token_level_rewards"] == pytest.approx(wanted, abs=1e-6)
    assert finished.rows[1]["actor/kl"] == pytest.approx(np.mean(halves), rel=1e-4)


STILL = "A.optim.lr=0 steps=1"


@pytest.fixture(scope="module")
def own(lab):
    return loop_columns.write(lab.folder)


def run(lab, own, estimator, *words, reward="score"):
    source = f"custom_reward_function.path={own} custom_reward_function.name={reward}"
    name = f"{estimator} {len(list(lab.folder.iterdir()))}"
    return lab.run(name, f"algorithm.adv_estimator={own}:{estimator}", source, *words)


def prompts_of(samples):
    pairs = zip(samples["tokens"], samples["response_mask"], strict=True)
    return [[t for t, m in zip(tokens, mask, strict=True) if not m] for tokens, mask in pairs]


def greedy_response(model, prompt, tokens):
    ids = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == model.config.eos_token_id:
            break
    return ids[len(prompt) :]


def test_each_prompt_is_answered_greedily_once_and_scored_like_its_samples(lab, own):
    finished = run(lab, own, "against_greedy", STILL, "R.temperature=0.7")
    samples, row = finished.samples(1), finished.rows[0]
    model = AutoModelForCausalLM.from_pretrained(lab.model)
    tokenizer = AutoTokenizer.from_pretrained(lab.model)
    expected = []
    for prompt in prompts_of(samples):
        text = tokenizer.decode(greedy_response(model, prompt, 6), skip_special_tokens=True)
        expected.append(len(set(text)) / 6)
    assert samples["reward_baselines"] == pytest.approx(expected)
    assert len(set(expected)) > 1 and expected[::3] == expected[1::3] == expected[2::3]
    for i, mask in enumerate(samples["response_mask"]):
        better = samples["scores"][i] - expected[i]
        assert samples["advantages"][i] == pytest.approx([better * m for m in mask], abs=1e-6)
    assert row["critic/baseline/mean"] == pytest.approx(np.mean(expected))
    ends = (row["critic/baseline/min"], row["critic/baseline/max"])
    assert ends == pytest.approx((min(expected), max(expected)))
    assert 0 < row["timing/gen_max"] < row["timing/step"]


@pytest.mark.slow
def test_the_samples_are_those_of_a_run_without_baselines(lab, own):
    with_them, without = (run(lab, own, name, STILL) for name in ("against_greedy", "in_turn"))
    assert with_them.samples(1)["tokens"] == without.samples(1)["tokens"]
    assert "timing/gen_max" not in without.rows[0] and "timing/old_log_prob" not in without.rows[0]
    unread = {"reward_baselines", "sum_pi_squared", "old_log_probs", "ref_kl", "ref_hidden"}
    assert unread.isdisjoint(without.samples(1))


def test_a_reward_model_scores_greedy_responses_too(lab, own):
    path = make_scorer(lab.folder / "scorer", lab.model)
    words = f"algorithm.adv_estimator={own}:against_greedy reward_model.enable=true"
    samples = lab.run("scored", words, f"reward_model.model.path={path}", STILL).samples(1)
    model = AutoModelForCausalLM.from_pretrained(lab.model)
    scorer = AutoModelForSequenceClassification.from_pretrained(path)
    expected = []
    for prompt in prompts_of(samples):
        with torch.no_grad():
            ids = torch.tensor([prompt + greedy_response(model, prompt, 6)])
            expected.append(float(scorer(ids).logits[0, 0]))
    assert samples["reward_baselines"] == pytest.approx(expected, abs=1e-5)
    assert np.std(expected) > 0


@pytest.mark.slow
def test_the_sum_of_squared_probabilities_is_that_of_each_tokens_distribution(lab, own):
    finished = run(lab, own, "by_collisions", STILL, "R.temperature=0.7")
    model = AutoModelForCausalLM.from_pretrained(lab.model, dtype=torch.float64)
    expected = []
    for tokens, mask in finished.each(1, "tokens", "response_mask"):
        with torch.no_grad():
            chances = torch.softmax(model(torch.tensor([tokens])).logits[0] / 0.7, -1).square().sum(-1)
        expected += chances[:-1][torch.tensor(mask[1:])].tolist()
    found = finished.tokens(1)
    assert [token["sum_pi_squared"] for token in found] == pytest.approx(expected, abs=1e-6)
    wanted = [token["scores"] * (1 - e) for token, e in zip(found, expected, strict=True)]
    assert [token["advantages"] for token in found] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "weights"),
    [
        ("null", {"digits": 1, "tens": 10}),  # null: all numbers besides the score, by name
        ("[tens, digits]", {"tens": 1, "digits": 10}),
        ("[tens]", {"tens": 1}),
        ("[digits, score]", {"digits": 1, "score": 10}),
    ],
)
def test_components_of_the_reward_come_in_the_order_of_their_names(lab, own, keys, weights):
    finished = run(lab, own, "in_turn", STILL, f"algorithm.gdpo_reward_keys={keys}")
    samples, row = finished.samples(1), finished.rows[0]
    lengths = [len(text) for text in samples["response_text"]]
    for i, mask in enumerate(samples["response_mask"]):
        named = {"digits": 0.5, "tens": lengths[i] / 8, "score": samples["scores"][i]}
        total = sum(weight * named[name] for name, weight in weights.items())
        assert samples["advantages"][i] == pytest.approx([total * m for m in mask], abs=1e-5)
    assert len(set(lengths)) > 1
    assert row["reward/extra/tens"] == pytest.approx(np.mean(lengths) / 8)
    assert row["reward/extra/digits"] == 0.5


def test_components_that_differ_between_samples_name_the_sample():
    same = {"b": 2.0, "a": 1.0}
    assert reward_components([same, {"a": 3.0, "b": 4.0}], ()).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(RewardError, match="differ from sample to sample") as caught:
        reward_components([same, same, {"a": 1.0}], ())
    assert (caught.value.field, caught.value.got) == ("sample 2", "a")
    with pytest.raises(RewardError, match="lacks a component") as caught:
        reward_components([{**same, "c": 0.0}, same], ("c", "a"))
    assert caught.value.field == "sample 1" and "gdpo_reward_keys" in str(caught.value.expected)
    with pytest.raises(RewardError, match="there are none"):
        reward_components([{}, {}], ())


@pytest.mark.slow
def test_a_run_whose_reward_returns_other_numbers_ends_with_that(lab, own):
    with pytest.raises(RewardError, match="differ from sample to sample"):
        run(lab, own, "in_turn", STILL, "data.shuffle=false", reward="score_unevenly")


REFUSED = """
algorithm.gdpo_reward_keys=[a] | gdpo_reward_keys
algorithm.adv_estimator=gdpo reward_model.overlong_buffer={enable: true, len: 2} | gdpo does not read
algorithm.adv_estimator=OWN:against_greedy W.batch=BATCH | Own without reward_baselines
A.use_kl_loss=true A.kl_loss_type=full W.ref=REFERENCE | Own without reference_head
"""


@pytest.mark.parametrize(("words", "said"), rows(REFUSED))
def test_what_nobody_reads_or_gives_is_refused_before_anything_starts(lab, own, words, said):
    batch = lab.worker("compute_advantages measure measure_validation write_samples")
    words = words.replace("REFERENCE", lab.worker("compute_ref_log_prob"))
    with pytest.raises(TandemError, match=said):
        lab.run("refused", words.replace("OWN", str(own)).replace("BATCH", batch))
