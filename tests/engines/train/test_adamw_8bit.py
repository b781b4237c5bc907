"""AdamW with 8-bit moments, where torchao is installed. Its update is compiled: a minute on a CPU."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from tandem.config.optim import OptimConfig
from tandem.engines.train.optimizers import build_optimizers, set_learning_rate
from tandem.models.collectives import CollectiveMeter
from tests.engines.train import synthetic

quantisation = pytest.importorskip("torchao.optim.quant_utils")
pytestmark = pytest.mark.slow
BLOCK = 256
EIGHT_BITS = {"optimizer": "adamw_8bit"}


def stored(values, signed):
    """Store in 8 bits: a value becomes the nearest of 256 fractions of the largest of its block of 256."""
    levels = torch.tensor(quantisation.create_dynamic_map(signed=signed), dtype=torch.float64)
    blocks = values.reshape(-1, BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    nearest = (blocks[..., None] / scale[..., None] - levels).abs().argmin(-1)
    return (levels[nearest] * scale).view(values.shape)


def test_four_steps_follow_the_equation():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(64, 64, bias=False))
    config = OptimConfig(optimizer="adamw_8bit", lr=0.1, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-3)
    (optimizer,) = build_optimizers(module, [], config, CollectiveMeter())
    (weight,) = module.parameters()
    wanted = weight.detach().double()
    m, v = torch.zeros_like(wanted), torch.zeros_like(wanted)
    for step, lr in enumerate((0.05, 0.1, 0.1, 0.02), 1):
        weight.grad = torch.randn(64, 64)
        gradient = weight.grad.double()
        set_learning_rate(optimizer, lr)
        optimizer.step()
        m, v = 0.8 * m + 0.2 * gradient, 0.9 * v + 0.1 * gradient**2
        update = (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-3)
        wanted = wanted * (1 - lr * 0.1) - lr * update
        m, v = stored(m, True), stored(v, False)
    assert float((weight.detach().double() - wanted).abs().max()) < 1e-2
    assert float((weight.detach().double() - wanted).abs().median()) < 1e-6


def test_state_is_small_moves_and_resumes(tmp_path):
    """The embedding, 256 rows of 32, is large enough to be kept in 8 bits."""
    torch.manual_seed(0)
    shape = synthetic.SHAPE | {"vocab_size": 256}
    AutoModelForCausalLM.from_config(Qwen2Config(**shape)).save_pretrained(tmp_path / "model")
    batch, loss, micro = synthetic.make_batch(torch.float32), synthetic.SyntheticLoss(), synthetic.CUTS["all"]

    def engine(optim):
        return synthetic.make_engine(tmp_path / "model", precision="fp32", optim=optim)

    first, resumed, plain = engine(EIGHT_BITS), engine(EIGHT_BITS), engine({})
    weights = plain.state_info()["parameters"]
    levels = 4 * 256  # bytes; each 8-bit tensor has a table of the values that its codes stand for
    saved = 2 * (256 * 32 * 3 - 4 * 256 * 32 // BLOCK - levels)
    assert plain.state_info()["optimizer@cpu"] - first.state_info()["optimizer@cpu"] == saved
    assert plain.state_info()["optimizer@cpu"] > 8 * weights
    untouched = synthetic.weights(first)
    assert all(torch.equal(value, untouched[name]) for name, value in plain.weights())
    first.train_step(batch, loss, micro=micro)
    first.save(tmp_path / "saved")
    resumed.load(tmp_path / "saved")
    for one in (first, resumed):
        one.train_step(batch, loss, micro=micro)
    pairs = zip(first.weights(), resumed.weights(), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    assert not torch.equal(untouched["model.embed_tokens.weight"], next(first.weights())[1])
