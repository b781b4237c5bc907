"""Helpers that the tests of tensor parallelism share with their job.

Tiny models of every layout that can be split, and the steps to compare.
"""

import synthetic
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

STEPS = 3
SAVED = {2: ("qwen2",), 4: ("qwen2", "llama")}  # models whose checkpoints are resumed, by number of ranks
MIXED = {"model_dtype": "fp32", "dtype": "bf16"}
SHAPE = {**synthetic.SHAPE, "num_hidden_layers": 2}
# A vocabulary of 31 is not divisible by the ranks. Heads and columns are, by four in the last model.
CONFIGS = {
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**{**SHAPE, "head_dim": 16, "tie_word_embeddings": False}),
    "llama": lambda: LlamaConfig(
        **{**SHAPE, "tie_word_embeddings": False, "vocab_size": 32, "pad_token_id": 20},
        attention_bias=True,
        mlp_bias=True,
    ),
    "mistral": lambda: MistralConfig(
        **{**SHAPE, "tie_word_embeddings": False, "num_key_value_heads": 4, "sliding_window": None}
    ),
}


def save_models(folder):
    """Save random models. Their biases and norms are random too."""
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
    synthetic.save_scorer(folder / "scorer")
    return folder


def loss_and_outputs(kind):
    if kind == "value":
        return synthetic.ValueLoss(), frozenset({"values"})
    return synthetic.SyntheticLoss("seq-mean-token-mean"), frozenset(
        {"log_probs", "entropy", "sum_pi_squared"}
    )


def batch_of(precision):
    return synthetic.make_batch(torch.float64 if precision == "fp64" else torch.float32)


def train(engine, rows, kind, steps=STEPS):
    """Take some steps and return their metrics and the outputs of a forward pass after them."""
    loss, outputs = loss_and_outputs(kind)
    micro = synthetic.CUTS["three"]
    metrics = [engine.train_step(rows, loss, micro=micro).to_floats() for _ in range(steps)]
    found = engine.forward(rows, outputs=outputs, micro=micro)
    return metrics, {name: found.ragged(name).values for name in outputs}
