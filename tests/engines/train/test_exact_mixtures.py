"""Training and native rollout of mixtures of experts equal transformers' own model."""

import pytest
import torch

from tandem.models.double_precision import double_precision
from tandem.protocol import DataProto
from tests.engines.rollout.case import drain, native, request
from tests.engines.train import synthetic
from tests.engines.train.matrix import KEPT, MIXTURES
from tests.engines.train.synthetic import (
    CUTS,
    SyntheticLoss,
    load_plain,
    make_batch,
    make_engine,
    output,
    reference,
)
from tests.support.marks import slow_but

LIMIT = 1e-9
each_mixture = pytest.mark.parametrize("name", slow_but(["qwen3_moe", "deepseek_v3"], MIXTURES))


@each_mixture
def test_packed_training(models, name):
    batch, plain = make_batch(), load_plain(models / name)
    engine = make_engine(models / name, model=KEPT)
    with double_precision():
        wanted, loss, log_probs = reference(plain, batch)
        wanted = {key: grad for key, grad in wanted.items() if grad is not None}
        for cut in CUTS:
            found = output(engine, DataProto({"tokens": batch.ragged("tokens")}), cut=cut)
            for row, expected in zip(found, log_probs, strict=True):
                torch.testing.assert_close(row[1:], expected, rtol=LIMIT, atol=LIMIT)
            grads, metrics = synthetic.gradients(engine, batch, SyntheticLoss(), CUTS[cut])
            assert synthetic.relative_difference(grads, wanted) <= LIMIT, cut
            assert metrics["loss"] == pytest.approx(loss, rel=LIMIT)


@each_mixture
def test_native_rollout(models, name):
    requests = [request(str(i), prompt=size, max_tokens=20) for i, size in enumerate((1, 9, 23))]
    model = load_plain(models / name)
    with double_precision(), torch.no_grad():
        engine = native(model)
        engine.submit(requests)
        samples = drain(engine)
        for each in requests:
            prompt, written = each.prompt_ids, torch.from_numpy(samples[each.id].token_ids)
            ids = torch.cat([torch.from_numpy(prompt), written])
            log_p = model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = log_p.gather(1, written[:, None])[:, 0]
            found = torch.from_numpy(samples[each.id].log_probs)
            torch.testing.assert_close(found, expected, rtol=LIMIT, atol=LIMIT)
