from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.data.preferences import PreferenceDataset
from tandem.data.sft import SFTDataset
from tandem.engines.train.base import MicroBatching
from tandem.engines.train.fsdp import FSDPEngine
from tandem.trainer.supervised import SupervisedTrainer
from tandem.workers.losses import NextTokenLoss, PreferenceLoss
from tests.support.runs import assert_same, at_step, interrupt, without_times
from tests.support.school import FP64, school

__all__ = ["school"]

CUTS = {"whole": MicroBatching(), "tokens": MicroBatching(max_tokens=60)}
CUTS |= {f"{rows} rows": MicroBatching(max_samples=rows) for rows in (1, 4)}
CENTRE = 0.05
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


def engine_on(folder, kind, precision):
    return FSDPEngine(
        folder, kind=kind, model=BackboneConfig(path=str(folder)), fsdp=FSDPConfig(model_dtype=precision),
        optim=OptimConfig(lr=0.01), total_steps=10, device=torch.device("cpu"),
    )  # fmt: skip


def gradients(engine, batch, loss, micro):
    """Return the whole gradient by Hugging Face names, and the metrics, without changing the weights."""
    taken: dict[str, Tensor] = {}

    def take(*_: Any) -> None:
        named = engine.module.named_parameters()
        taken.update({engine.module.hf_name(n): p.grad.full_tensor().clone() for n, p in named})

    engine._state.step = take
    return taken, engine.train_step(batch, loss, micro=micro).to_floats()


def gap(found, model):
    """Return the relative distance of two gradients, each taken as one vector."""
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(found) == set(wanted)
    apart = sum(float((found[n].double() - wanted[n].double()).square().sum()) for n in found)
    return (apart / sum(float(g.double().square().sum()) for g in wanted.values())) ** 0.5


@pytest.fixture(scope="module")
def scorer(school):
    torch.manual_seed(3)
    folder = school.folder / "scorer"
    model = AutoModelForSequenceClassification.from_pretrained(school.model, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(school.model).save_pretrained(folder)
    return folder


def plain_preferences(model, data, rows):
    """Put the gradient of the mean loss into the model, one pair at a time, without padding or packing."""
    seen = []
    for row in rows:
        sides = (side.row(row)[None].long() for side in (data.chosen, data.rejected))
        chosen, rejected = (model(ids).logits[0, 0] for ids in sides)
        margin = float(data.margins[row])
        loss = torch.log1p(torch.exp(-(chosen - rejected - margin))) + CENTRE * (chosen + rejected) ** 2
        (loss / len(rows)).backward()
        seen.append([float(value.detach()) for value in (loss, chosen - rejected, chosen, rejected)])
    means = np.mean(seen, axis=0).tolist()
    names = ("loss", "margin", "reward_chosen", "reward_rejected")
    return {"accuracy": np.mean([row[1] > 0 for row in seen]), **dict(zip(names, means, strict=True))}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-9), ("fp32", 1e-5)])
def test_preference_gradients_are_those_of_a_plain_loop(school, scorer, precision, tolerance, cut):
    tokenizer = AutoTokenizer.from_pretrained(school.model)
    data = PreferenceDataset(str(school.files["rm"][0]), tokenizer, max_length=48, margin_key="margin")
    batch, load = data.batch(range(11), uid_prefix="0"), AutoModelForSequenceClassification.from_pretrained
    plain = load(scorer, dtype=DTYPES[precision], attn_implementation="sdpa")
    wanted = plain_preferences(plain, data, range(11))
    engine = engine_on(scorer, "score", precision)
    found, metrics = gradients(engine, batch, PreferenceLoss(CENTRE), CUTS[cut])
    assert gap(found, plain) <= tolerance
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-9), ("fp32", 1e-6)])
def test_packed_next_token_loss_is_transformers_own_on_a_padded_batch(school, precision, tolerance, cut):
    tokenizer = AutoTokenizer.from_pretrained(school.model)
    batch = SFTDataset(str(school.files["sft"][0]), tokenizer).batch(range(13), uid_prefix="0")
    load = AutoModelForCausalLM.from_pretrained
    plain = load(school.model, dtype=DTYPES[precision], attn_implementation="sdpa")
    tokens, learnt = batch.ragged("tokens"), batch.ragged("response_mask")
    width = int(tokens.lengths.max())
    labels = torch.where(learnt.to_padded(0), tokens.to_padded(0), -100)
    attention_mask = (torch.arange(width) < tokens.lengths[:, None]).long()
    output = plain(input_ids=tokens.to_padded(0), attention_mask=attention_mask, labels=labels)
    loss = output.loss
    if precision == "fp64":  # transformers computes the loss itself in fp32
        logits = output.logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)
    loss.backward()
    engine = engine_on(school.model, "policy", precision)
    found, metrics = gradients(engine, batch, NextTokenLoss(), CUTS[cut])
    assert metrics["loss"] == pytest.approx(loss.item(), rel=tolerance)
    assert gap(found, plain) <= 10 * tolerance


def test_a_run_validates_on_every_held_out_row_once(school, scorer):
    """Seven rows are read in batches of three; the learning rate is zero, so the model does not change."""
    words = ("data.train_batch_size=3 optim.lr=0 steps=1", FP64)
    margins = f"data.margin_key=margin center_rewards_coefficient={CENTRE}"
    row = school.run("rm", "held_out", f"model.path={scorer}", *words, margins).rows[-1]
    tokenizer = AutoTokenizer.from_pretrained(scorer)
    data = PreferenceDataset(str(school.files["rm"][1]), tokenizer, margin_key="margin")
    plain = AutoModelForSequenceClassification.from_pretrained(scorer, dtype=torch.float64)
    for name, value in plain_preferences(plain, data, range(7)).items():
        assert row[f"val/{name}"] == pytest.approx(value, rel=1e-9), name
    row = school.run("sft", "held_out_talks", *words).rows[-1]
    talks = SFTDataset(str(school.files["sft"][1]), tokenizer)
    causal = AutoModelForCausalLM.from_pretrained(school.model, dtype=torch.float64)
    surprise = []
    for ids, mask in zip(talks.tokens, talks.response_mask, strict=True):
        log_probs = causal(ids[None].long()).logits[0, :-1].log_softmax(-1)
        surprise += (-log_probs.gather(1, ids[1:, None].long())[mask[1:], 0]).tolist()
    assert row["val/loss"] == pytest.approx(np.mean(surprise), rel=1e-9)


@pytest.fixture(scope="module")
def whole(school):
    return {task: school.run(task, f"{task}_whole", "trainer.save_freq=2") for task in ("sft", "rm")}


@pytest.mark.parametrize("task", ["sft", "rm"])
def test_a_supervised_run_goes_on_after_an_interrupt_bit_for_bit(school, whole, task):
    with at_step(3, interrupt, trainer=SupervisedTrainer):
        stopped = school.run(task, f"{task}_stopped", "trainer.save_freq=2")
    assert stopped.trainer.session.interrupted and [row["step"] for row in stopped.rows] == [1, 2, 3]
    resumed = school.run(task, f"{task}_stopped", "trainer.save_freq=2")
    assert any("after step 3" in sentence for sentence in resumed.said)
    assert_same(resumed, whole[task])


@pytest.mark.parametrize("task", ["sft", "rm"])
def test_micro_batches_change_nothing(school, task):
    def learnt(name: str, *words: str) -> list[dict[str, Any]]:
        return without_times(school.run(task, f"{task}_{name}", FP64, *words).rows)

    by_tokens = learnt("by_tokens", "max_token_len_per_gpu=96")
    by_rows = learnt("by_rows", "use_dynamic_bsz=false", "micro_batch_size_per_gpu=2")
    for first, second in zip(by_tokens, by_rows, strict=True):
        assert first == pytest.approx(second, rel=1e-9, abs=1e-9)


def test_what_is_reported_of_a_step(whole):
    rm = {name for row in whole["rm"].rows for name in row if name.startswith(("rm/", "val/"))}
    measures = {"loss", "accuracy", "margin", "reward_chosen", "reward_rejected"}
    assert rm == {f"{of}/{name}" for of in ("rm", "val") for name in measures} | {"rm/grad_norm", "rm/lr"}
    last = whole["sft"].rows[-1]
    assert {"sft/loss", "sft/grad_norm", "sft/lr", "val/loss", "training/epoch"} <= set(last)
    assert last["perf/step_tokens_per_s"] > 0 and last["timing/update"] > 0
    assert [row["training/epoch"] for row in whole["rm"].rows] == [0, 0, 1, 1, 2, 2]
    assert (whole["rm"].folder / "config.yaml").is_file()


def test_a_new_head_is_drawn_by_the_seed_and_a_trained_one_is_kept(school, scorer):
    words = "optim.lr=0 steps=1"

    def head(name: str, *more: str) -> tuple[Tensor, list[str]]:
        torch.manual_seed(len(name))  # earlier draws must not matter
        run = school.run("rm", name, words, *more)
        return run.weights()["score.weight"], run.said

    first, said = head("seed_0")
    assert any("its score head is new" in sentence for sentence in said)
    assert torch.equal(first, head("seed_0_again")[0])
    in_double, _ = head("seed_0_fp64", FP64)
    assert torch.equal(first, in_double.float())
    assert not torch.equal(first, head("seed_1", "trainer.seed=1")[0])
    assert 0.5 < float(first.norm()) < 2  # 32 numbers with variance 1/33
    kept, said = head("kept", f"model.path={scorer}")
    trained = AutoModelForSequenceClassification.from_pretrained(scorer).score.weight
    assert torch.equal(kept, trained) and not any("score head" in sentence for sentence in said)
