"""The failure museum: the faults of docs/museum.md, with the ways to put them into a run."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support import broken
from tests.support.broken import Patch, changed, engine, prompts, requests, rollout


@dataclass(frozen=True)
class Fault:
    """A fault, where users met it, and the warning's name or a part of the error that a run has about it."""

    what: str
    met: str
    named: str
    put_in: Callable[[Patch], None]
    words: Sequence[str]
    effect: int  # the first step in which the fault can show
    symptom: bool  # whether the message describes only the symptom, with a list of possible causes


START, END = 3, 44
"""Tokens that stand for the beginning of a text and the end of a turn, which the vocabulary lacks."""
HF, KL, UPDATES = "R.name=hf", "A.use_kl_loss=true", "A.ppo_mini_batch_size=2"
Way = tuple[str, Callable[[Patch], None], str]
WAYS: list[Way] = [  # a name, what puts the fault in, and words of the run's config; in the page's order
    ("weights never sent", engine(lambda first, newest: first), HF),
    ("weights damaged", engine(changed(broken.damage)), HF),
    ("weights exchanged", engine(changed(broken.exchange)), HF),
    ("old weights", engine(lambda first, newest: first, version=0, honest=False), HF),
    ("something old left", engine(lambda first, newest: first, honest=False), HF),
    ("adapters never sent", broken.base_weights, f"M.lora_rank=8 {HF} A.optim.lr=0.05"),
    ("encoded again", rollout(broken.reencoded), ""),
    ("top-p", requests(lambda r: replace(r, params=replace(r.params, top_p=0.7))), HF),
    ("temperature", broken.raw_log_probs, f"{HF} R.temperature=0.7"),
    ("log-probs late", rollout(broken.late_log_probs), HF),
    ("mask early", rollout(broken.early_mask), UPDATES),
    ("mask late", rollout(broken.late_mask), ""),
    ("prompt without its first token", requests(lambda r: replace(r, prompt_ids=r.prompt_ids[1:])), HF),
    ("leak at the start", broken.leaking(at_once=True), ""),
    ("leak later", broken.leaking(at_once=False), ""),
    ("dropout", broken.dropout, ""),
    ("numerics", engine(changed(broken.rounded), honest=False), HF),
    ("loss scale", broken.own_counts, "A.ppo_micro_batch_size_per_gpu=3"),
    ("ratio", broken.fresh_old, UPDATES),
    ("reference", broken.one_model, KL),
    ("KL", broken.turned_kl, KL),
    ("optimizer", broken.nothing_moves, ""),
    ("learning rate", broken.no_rate, ""),
    ("groups", rollout(broken.mixed), ""),
    ("scores", broken.other_scores, ""),
    ("rows twice", rollout(broken.repeated), ""),
    ("sign", broken.against, "R.n=6"),
    ("end of turn", prompts(lambda ids: ids, ends=frozenset({1, 13})), ""),
    ("two begins", prompts(lambda ids: [START, START, *ids[-5:]], begin=START), ""),
    ("ended prompts", prompts(lambda ids: [*ids[-6:], END], ends=frozenset({1, END})), ""),
    ("padded prompts", prompts(lambda ids: [0, *ids[-6:]]), ""),
    ("lost prompts", broken.read_ahead, ""),
    ("reward always zero", broken.nothing, ""),
]
PAGE = (Path(__file__).parents[2] / "docs" / "museum.md").read_text("utf-8")
ROWS = re.findall(r"^\| (.+?) \| (.+?) \| (\d) \| (?:ends: …(.+)…|`(\w+)`( \(a symptom\))?) \|$", PAGE, re.M)
FAULTS = {
    name: Fault(what, met, error or warning, put_in, words.split(), int(effect), bool(symptom))
    for (what, met, effect, error, warning, symptom), (name, put_in, words) in zip(ROWS, WAYS, strict=True)
}
