from tandem.protocol import SamplingParams
from tandem.watch.checks import Facts
from tandem.watch.integrity import broken_rules
from tandem.watch.watch import Watch

FACTS = Facts(SamplingParams(temperature=1.0, max_tokens=4, seed=0), 1.0, 8, updates=1, recompute_old=False)
MOMENTS = {f"rollout/moment/{name}": value for name, value in zip(
    ("p", "q", "pp", "qq", "pq"), (0.5, 0.5, 0.3, 0.3, 0.275), strict=True
)}  # fmt: skip


def step(number):
    """Return a step; rollout and training agree in the first three only, and the sixth skips prompts."""
    difference = 1e-6 if number <= 3 else 0.5
    found = {"mean": difference, "raised": difference / 2, "limit": 1e-4}
    used = 8.0 * number + (16.0 if number >= 6 else 0.0)
    rewards = {"reward/min": 0.0, "reward/mean": 0.0, "reward/max": 0.0, "training/prompts_used": used}
    return {f"rollout/log_prob_diff_{name}": value for name, value in found.items()} | rewards | MOMENTS


def test_a_resumed_run_warns_as_one_that_was_not_ended():
    for resumed_at in range(14):
        told, rows = [], []

        def tell(name, sentence, number, told=told):
            told.append((name, number))

        watch = Watch(8, tell)
        for number in range(1, 15):
            rows.append(watch.check_samples(number, step(number), FACTS))
            watch.check_learning(number, rows[-1])
            if number == resumed_at:
                before, watch = watch, Watch(8, tell)
                watch.restore(rows, before.named)
        assert told == [("leftover", 4), ("lost_prompts", 6), ("reward_constant", 10)], resumed_at


def test_a_step_that_goes_back_in_the_data_is_told():
    before = {"training/prompts_used": 24.0}
    for used, names in ((8.0, ["lost_prompts"]), (24.0, []), (32.0, []), (40.0, ["lost_prompts"])):
        found = broken_rules({"training/prompts_used": used}, before, FACTS)
        assert list(found) == names, used
        assert not found or f"ends after {used:.0f} prompts" in found["lost_prompts"]
