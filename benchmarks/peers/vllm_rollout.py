"""vLLM's side of rollout_vs_vllm.py. Runs in vLLM's own environment (`make peers`)."""

from __future__ import annotations

import platform
import time

import torch
import transformers
import vllm
from sides import serve
from vllm import LLM, SamplingParams


class VLLMSide:
    """The requests of rollout_vs_vllm.py."""

    def versions(self) -> dict[str, str]:
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "threads": str(torch.get_num_threads()),
        }

    def open(self, model: str, dtype: str, max_num_seqs: int, max_model_len: int) -> None:
        self._llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            enforce_eager=True,
            disable_log_stats=True,
        )

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> tuple[float, list[int]]:
        """Generate responses; return the seconds and the number of tokens for each prompt.

        The prefix cache is cleared first, as after a weight update. The log-prob of each token is computed
        too.
        """
        self._llm.reset_prefix_cache()
        params = [
            SamplingParams(temperature=1.0, max_tokens=most, ignore_eos=True, logprobs=0, detokenize=False)
            for most in max_tokens
        ]
        began = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        took = time.perf_counter() - began
        return took, [len(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    side = VLLMSide()
    serve({name: getattr(side, name) for name in dir(side) if not name.startswith("_")})
