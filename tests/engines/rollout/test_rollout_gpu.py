import pytest
import torch

from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.rollout.native.engine import NativeEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("name", ["fused", "module", "hf"])
def test_cuda_writes_what_the_cpu_writes(name, tiny, make_requests):
    requests = make_requests(20, 2, temperature=0.8, top_p=0.9)
    written = []
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        options = {"device": device, "max_length": 96, "max_num_seqs": 16}
        engine = HFEngine(**options) if name == "hf" else NativeEngine(runner=name, **options)
        engine.update_weights(SharedModule(tiny(dtype=torch.float64).to(device)), 0)
        written.append([sample.token_ids.tolist() for sample in generate(engine, requests)])
        engine.sleep()
    assert written[0] == written[1]
