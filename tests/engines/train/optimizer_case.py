"""A module with all kinds of weights, fixed gradients, and slow float64 references of the optimizers."""

import torch
from torch import nn

from tandem.config.optim import OptimConfig
from tandem.engines.train.optimizers import build_optimizers, set_learning_rate
from tandem.models.collectives import CollectiveMeter

HIDDEN = {f"layers.{i}.{name}.weight" for i in range(2) for name in ("up", "down", "square")}
SPARED = {f"layers.{i}.{name}" for i in range(2) for name in ("norm.weight", "up.bias", "down.bias")}
SPARED |= {"final_norm.weight"}
RATES = (0.0, 0.05, 0.1, 0.1, 0.02)
OPTIONS = {"weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "lr": 0.1}
CHOICES = {
    "adamw": {},
    "foreach": {"fused": False},
    "adamw_cpu": {"optimizer": "adamw_cpu"},
    "adamw_cpu foreach": {"optimizer": "adamw_cpu", "fused": False},
    "muon": {"optimizer": "muon", "muon_momentum": 0.7},
    "all decay": {"no_weight_decay": ()},
    "embedding": {"no_weight_decay": ("embedding",)},
}
SHARDED = {2: ("adamw", "foreach", "adamw_cpu", "muon"), 4: ("adamw", "muon")}
"""The choices that are tried with each number of ranks."""


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.up = nn.Linear(8, 21)
        self.down = nn.Linear(21, 8)
        self.square = nn.Linear(8, 8, bias=False)


class Module(nn.Module):
    """A module whose 21, 7 and 1 rows are divisible by no number of ranks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.final_norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 7, bias=False)
        self.value = nn.Linear(8, 1, bias=False)


def make_module(dtype=torch.float64):
    torch.manual_seed(3)
    module = Module().to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return module


def gradients(step, module):
    draw = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype)
        for name, p in module.named_parameters()
    }


def optim(choice):
    return OptimConfig(**{**OPTIONS, **CHOICES[choice]})


def run(module, config, place=lambda value, parameter: value):
    """Take one step for each of `RATES`; `place` shards a gradient. Return the optimizers and their meter."""
    meter = CollectiveMeter()
    optimizers = build_optimizers(module, module.layers, config, meter)
    for step, lr in enumerate(RATES):
        whole = gradients(step, module)
        for name, parameter in module.named_parameters():
            parameter.grad = place(whole[name], parameter)
        for optimizer in optimizers:
            set_learning_rate(optimizer, lr)
            optimizer.step()
    return optimizers, meter


def newton_schulz(matrix):
    x = matrix / (matrix.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def reference(choice, hidden=HIDDEN):
    """Return the weights after all steps by name, computed in float64."""
    config, module = optim(choice), make_module()
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    state = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
    spared = {"bias": SPARED, "embedding": {"embed.weight"}}
    undecayed = set().union(*(spared.get(kind, set()) for kind in config.no_weight_decay))
    (beta1, beta2), eps = config.betas, config.eps
    for step, lr in enumerate(RATES):
        for name, g in gradients(step, module).items():
            w, (m, v) = weights[name], state[name]
            decayed = w * (1 - lr * (0.0 if name in undecayed else config.weight_decay))
            if config.optimizer == "muon" and name in hidden:
                m = config.muon_momentum * m + g
                update = newton_schulz(g + config.muon_momentum * m)
                weights[name] = decayed - lr * 0.2 * max(w.shape) ** 0.5 * update
            else:
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g * g
                m_hat, v_hat = m / (1 - beta1 ** (step + 1)), v / (1 - beta2 ** (step + 1))
                weights[name] = decayed - lr * m_hat / (v_hat.sqrt() + eps)
            state[name] = m, v
    return weights
