"""Test whether the training and rollout engines compute a model's architecture correctly.

Errors are possible because the training engine packs sequences and the native rollout engine has its own
implementation of attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.engines.rollout.base import SharedModule, finished
from tandem.engines.rollout.borrowed import borrowed
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.errors import EngineError, TandemError
from tandem.models.double_precision import double_precision
from tandem.models.packed_check import check_packed
from tandem.models.packed_verdict import require_sound
from tandem.models.small_copy import LONGEST, angle_limits, window_limits
from tandem.protocol import Request, SamplingParams

LIMIT = 1e-6
"""The largest accepted log-prob difference between native engine and transformers; relative above 1."""
_PROMPTS = (9, 2, 23)


def require_sound_model(
    path: str | Path, *, longest: int, native: bool, scorer: bool = False, trust_remote_code: bool = False
) -> None:
    """Check that training and the rollout compute an architecture correctly.

    No weights are read. The check takes seconds.

    Args:
        path: The folder of the model.
        longest: The number of tokens of the longest sequence.
        native: Whether the native engine samples from the model.
        scorer: Whether the model is trained as a reward model.
        trust_remote_code: Whether to run the model class that comes with the folder.

    Raises:
        ModelError: The result for packed sequences is wrong, or `check_packed` raises the error.
        EngineError: The native engine cannot run the model, or its log-probs are wrong.
    """
    found, model = check_packed(path, scorer=scorer, trust_remote_code=trust_remote_code)
    require_sound(found, path, longest)
    if not native:
        return
    beyond = found.limit is not None and longest > found.limit
    difference = native_difference(model, beyond=beyond)
    if not difference <= LIMIT:
        raise EngineError(
            "the native rollout engine computes this model wrong",
            field="actor_rollout_ref.rollout.name",
            got=f"{path}: log-probs differ from transformers' by {difference:.3g}",
            expected=f"at most {LIMIT:g}",
            remedy="set actor_rollout_ref.rollout.name=hf for this model",
        )


def native_difference(model: Any, *, beyond: bool) -> float:
    """Return the largest log-prob difference between the native engine and transformers' own attention.

    The difference is relative where the log-prob's absolute value is above 1, else absolute. The result is
    NaN if any difference is NaN.

    Args:
        model: The small copy of the model that `check_packed` returns.
        beyond: Whether sequences are longer than the model's windows, chunks and rotary limits.

    Raises:
        EngineError: The engine cannot run the model.
    """
    text = model.config.get_text_config()
    most = LONGEST if beyond else min([LONGEST, *window_limits(text)])
    most = max(2, min(most, getattr(text, "max_position_embeddings", None) or most))
    draw = np.random.default_rng(0)
    requests = [
        Request(
            str(row),
            0,
            draw.integers(text.vocab_size - 1, size=min(length, most - 1)),
            SamplingParams(max_tokens=most - min(length, most - 1)),
        )
        for row, length in enumerate(_PROMPTS)
    ]
    worst = 0.0
    with double_precision(), torch.no_grad():
        engine = NativeEngine(device=torch.device("cpu"), max_length=most)
        try:
            engine.update_weights(SharedModule(model), 0)
            samples = [sample for part in finished(engine, requests) for sample in part]
        except TandemError:
            raise
        except Exception as error:  # the code of a model class may raise anything
            raise EngineError(
                "the native rollout engine cannot run this model",
                field="actor_rollout_ref.rollout.name",
                got=f"{type(error).__name__}: {error}",
                remedy="set actor_rollout_ref.rollout.name=hf for this model",
            ) from error
        finally:
            engine.close()
        for sample in samples:
            prompt, written = requests[int(sample.uid)].prompt_ids, sample.token_ids
            row = torch.from_numpy(np.concatenate([prompt, written]))
            wanted = _log_probs(model, row)[len(prompt) - 1 :]
            gap = ((torch.from_numpy(sample.log_probs) - wanted).abs() / wanted.abs().clamp(min=1)).max()
            worst = float(gap) if not gap <= worst else worst
    return worst


def _log_probs(model: Any, row: Tensor) -> Tensor:
    """Return (T - 1) the log-prob of each token after the first, given the sequence before the token.

    The rotary angles are those of a sequence that ends before the token.
    """
    with borrowed(model, "eager"):
        logits = model(input_ids=row[None, :-1], use_cache=False).logits[0]
        for limit in sorted(angle_limits(model.config.get_text_config()), reverse=True):
            logits[:limit] = model(input_ids=row[None, :-1][:, :limit], use_cache=False).logits[0]
    return torch.log_softmax(logits, -1).gather(-1, row[1:, None]).squeeze(-1)
