from dataclasses import dataclass

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, Ragged
from tandem.workers.attribution import Reference, attribute


@dataclass(frozen=True)
class Recounted:
    """A loss that leaves out tokens, so that its gradient is multiplied by `factor`."""

    factor: float
    columns: frozenset = frozenset({"advantages"})
    compared: frozenset = frozenset()

    def __call__(self, out, columns, offsets, counts):
        return (out["log_probs"] * columns["advantages"]).sum() / counts.tokens, Metrics()

    def recount(self, metrics, counts):
        return self.factor


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_the_shares_of_a_recounted_loss_add_up_to_one(folder, factor):
    path = str(folder / "model")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float64)
    lengths, mask = [7, 5], [0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1]
    columns = {
        "tokens": torch.randint(1, 9, (12,)),
        "response_mask": torch.tensor(mask, dtype=torch.bool),
        "advantages": torch.randn(12, dtype=torch.float64),
    }
    ragged = {name: Ragged.from_lengths(values, lengths) for name, values in columns.items()}
    batch = DataProto(ragged, {"uid": ["a", "b"], "sample": [0, 0]})
    once, found = (
        attribute(Reference(path, model.state_dict(), 1.0), batch, Recounted(each), shares=True)
        for each in (1.0, factor)
    )
    assert found.norm == pytest.approx(factor * once.norm, rel=1e-12)
    assert float(torch.cat(found.shares).sum()) == pytest.approx(1, rel=1e-6)  # norms are in fp32
