"""Tandem's use of Liger, if the package is installed. Its head also runs on a CPU, in PyTorch."""

import pytest
import torch

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")

from liger_kernel.transformers.rms_norm import LigerRMSNorm
from liger_kernel.transformers.rope import liger_rotary_pos_emb
from liger_kernel.transformers.swiglu import LigerSwiGLUMLP
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2 import modeling_qwen2

from tandem.errors import ConfigError
from tandem.models.heads import liger as liger_head
from tandem.models.kernels import patch
from tests.models.small import SHAPE
from tests.support.heads import check_head, make_case


def test_head():
    check_head(liger_head.token_log_probs, *make_case(37, 290, 40, torch.bfloat16, scale=0.1), 0.6, 2e-2)


@pytest.mark.parametrize("rows", [0, 5])
def test_head_without_entropy_or_rows(rows):
    case = make_case(rows, 29, 12, torch.bfloat16)
    log_probs, entropy = liger_head.token_log_probs(*case, temperature=1.0, with_entropy=False)
    log_probs.sum().backward()
    assert entropy is None and log_probs.shape == (rows,) and log_probs.dtype == torch.float32


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", modeling_qwen2.apply_rotary_pos_emb)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE))


def test_every_layer_takes_the_kernels_and_no_other_model_does(model):
    plain = type(model.model.norm), type(model.model.layers[0].mlp), Qwen2ForCausalLM.forward
    patch(model)
    for layer in model.model.layers:
        assert layer.mlp.forward.__func__ is LigerSwiGLUMLP.forward
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
            assert norm.forward.__func__ is LigerRMSNorm.forward
    assert modeling_qwen2.apply_rotary_pos_emb is liger_rotary_pos_emb
    assert (modeling_qwen2.Qwen2RMSNorm, modeling_qwen2.Qwen2MLP, Qwen2ForCausalLM.forward) == plain


def test_a_kind_of_model_it_does_not_know(model):
    model.config.model_type = "abacus"
    with pytest.raises(ConfigError, match="no kernels for this kind of model"):
        patch(model)
