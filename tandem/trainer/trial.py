"""Tries whether a model folder's architecture can be trained: by the training engine on packed sequences, and
by the native rollout engine, which has attention of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.engines.rollout.base import SharedModule, finished
from tandem.engines.rollout.borrowed import borrowed
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.errors import EngineError, TandemError
from tandem.models.packed_check import check_packed, double_precision, require_sound
from tandem.models.small_copy import LONGEST, window_limits
from tandem.protocol import Request, SamplingParams

LIMIT = 1e-6
"""Of the difference between the native engine's log-probs and transformers', relative above 1."""
_PROMPTS = (9, 2, 23)


def require_sound_model(
    path: str | Path, *, longest: int, native: bool, scorer: bool = False, trust_remote_code: bool = False
) -> None:
    """Refuses an architecture that training or the rollout would compute wrong. No weights are read; it takes
    seconds.

    Args:
        path: the model's folder.
        longest: tokens of the longest sequence.
        native: whether the native engine samples from it.
        scorer: whether it is trained as a reward model.
        trust_remote_code: run the model class that the folder brings along.

    Raises:
        ModelError: packed sequences are not computed right; see also `check_packed`.
        EngineError: the native engine cannot run it, or computes it wrong.
    """
    found, model = check_packed(path, scorer=scorer, trust_remote_code=trust_remote_code)
    require_sound(found, path, longest)
    if not native:
        return
    beyond = found.limit is not None and longest > found.limit
    difference = native_difference(model, beyond=beyond)
    if not difference <= LIMIT:
        raise EngineError(
            "the native rollout engine does not compute this model",
            field="actor_rollout_ref.rollout.name",
            got=f"{path}: log-probs differ from transformers' by {difference:.3g}",
            expected=f"at most {LIMIT:g}",
            remedy="use rollout.name=hf for this model",
        )


def native_difference(model: Any, *, beyond: bool) -> float:
    """The largest difference of log-probs between the native engine and transformers' own attention, relative
    above 1; NaN where there is one.

    Args:
        model: the small copy that `check_packed` gives.
        beyond: whether sequences are longer than every window, chunk and angle limit of it.

    Raises:
        EngineError: the engine cannot run the model.
    """
    text = model.config.get_text_config()
    most = LONGEST if beyond else min([LONGEST, *window_limits(text)])
    most = max(2, min(most, getattr(text, "max_position_embeddings", None) or most))
    draw = np.random.default_rng(0)
    requests = [
        Request(
            str(row),
            0,
            draw.integers(text.vocab_size, size=min(length, most - 1)),
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
        except Exception as error:  # a model's class may raise anything
            raise EngineError(
                "the native rollout engine cannot run this model",
                field="actor_rollout_ref.rollout.name",
                got=f"{type(error).__name__}: {error}",
                remedy="use rollout.name=hf for this model",
            ) from error
        finally:
            engine.close()
        for sample in samples:
            prompt, written = requests[int(sample.uid)].prompt_ids, sample.token_ids
            row = torch.from_numpy(np.concatenate([prompt, written]))
            with borrowed(model, "eager"):
                logits = model(input_ids=row[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            wanted = torch.log_softmax(logits, -1).gather(-1, row[len(prompt) :, None]).squeeze(-1)
            gap = ((torch.from_numpy(sample.log_probs) - wanted).abs() / wanted.abs().clamp(min=1)).max()
            worst = float(gap) if not gap <= worst else worst
    return worst
