"""All Triton kernels compile for a GPU that is absent. Its interpreter accepts more Python than that."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [pytest.mark.triton, pytest.mark.slow]

SCRIPT = """
import re
import tempfile
from math import gcd
from pathlib import Path
from subprocess import run

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tandem.engines.rollout.draws import sampler_triton
from tandem.engines.rollout.native.ops import triton as ops_triton
from tandem.engines.rollout.native.attention import triton_kernels
from tandem.engines.rollout.native.attention.triton import Tiles, _shape
from tandem.engines.rollout.native.paged import LayerShape
from tandem.models import fused_kernels as layer_kernels
from tandem.models.fused import _TILE, _sizes, _warps
from tandem.models.heads import triton_kernels as head_kernels
from tandem.models.heads.triton import _SPAN, Blocks

CAPABILITY, SHARED = 90, 227 * 1024
TARGET = GPUTarget("cuda", CAPABILITY, 32)
FLOATS = ("eps", "scale", "softcap", "temperature")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def check(kernel, kinds, constants, warps=4, stages=3, spills=64):
    kinds = {name: "*" + kind for kind, names in kinds.items() for name in names.split()}
    scalar = {name: "fp32" if name in FLOATS else "i32" for name in kernel.arg_names}
    constexprs = dict.fromkeys(constants, "constexpr")
    signature = {name: (scalar | kinds | constexprs)[name] for name in kernel.arg_names}
    places = [at for at, name in enumerate(kernel.arg_names) if name in kinds or "stride" in name]
    aligned = {(at,): [["tt.divisibility", 16]] for at in places}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=TARGET, options={"num_warps": warps, "num_stages": stages})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, spilled = (int(re.search(name + r":(\\d+)", usage)[1]) for name in ("REG", "STACK"))
    print(f"{kernel.fn.__name__:16}{warps:6}{registers:10}{spilled:8}{made.metadata.shared:8}  {constants}")
    assert spilled <= spills, (kernel.fn.__name__, constants, usage)  # bytes per thread
    assert made.metadata.shared <= SHARED, (kernel.fn.__name__, constants, made.metadata.shared)
    widths = [int(width) for width in re.findall(r"wgmma\\.mma_async\\S*?n(\\d+)k", made.asm["ptx"])]
    assert min(widths, default=64) >= 64, (kernel.fn.__name__, constants, widths)  # see `Tiles.of`


print(f"{'kernel':16}{'warps':>6}{'registers':>10}{'spilled':>8}{'shared':>8}  sizes")


def attend(dim, group, dtype, decode, splits=1, window=0, softcap=0.0, chunk=0, sinks=False):
    shape, kind = LayerShape(4, dim, dim), KINDS[dtype]
    tiles = Tiles.of(shape, group, dtype, decode)
    kinds = {"i32": "tables starts lengths", kind: "queries keys values sinks"}
    written = "fp32" if splits > 1 else kind
    kinds[written] = kinds.get(written, "") + " out totals peaks"
    constants = dict(
        DECODE=decode, SPLITS=splits, LEAST_TILES=4, WINDOW=window, CHUNK=chunk, SOFTCAP=softcap,
        SINKS=sinks, GROUP=group, ROWS=tiles.rows, BLOCK=16, TILE=tiles.columns,
        RUN=gcd(16, tiles.columns), **_shape(shape),
    )
    check(triton_kernels.attend_kernel, kinds, constants, tiles.warps, tiles.stages)


for decode in (True, False):
    attend(64, 7, torch.bfloat16, decode)
    attend(128, 7, torch.bfloat16, decode, splits=4 if decode else 1, window=4096)
    attend(80, 4, torch.float16, decode)
    attend(64, 8, torch.bfloat16, decode, splits=4 if decode else 1, window=128, sinks=True)
    attend(128, 5, torch.bfloat16, decode, chunk=8192)
    attend(128, 4, torch.float32, decode)
    attend(256, 2, torch.bfloat16, decode, softcap=50.0)
    attend(256, 16, torch.float16, decode)
    attend(32, 1, torch.bfloat16, decode)
    attend(16, 4, torch.bfloat16, decode)
kinds = {"bf16": "out", "fp32": "parts totals peaks"}
check(triton_kernels.combine_kernel, kinds, dict(SPLITS=64, E=128, E_PAD=128))
kinds = {"bf16": "keys values new_keys new_values", "i64": "slots"}
check(triton_kernels.write_kernel, kinds, dict(H_PAD=4, BLOCK=16, **_shape(LayerShape(4, 128, 128))))
kinds = {"fp32": "peaks totals temperatures log_probs", "fp64": "uniforms", "i1": "greedy"}
kinds |= {"bf16": "logits", "i32": "best", "i64": "tokens"}
check(sampler_triton.weigh_kernel, kinds, dict(CHUNK=4096), 8)
check(sampler_triton.draw_kernel, kinds, dict(CHUNKS=38, CHUNKS_PAD=64, CHUNK=4096), 8)
check(ops_triton.norm_kernel, {"bf16": "out x added weights"}, dict(ADDED=True, E=3584, E_PAD=4096), 16)
kinds = {"bf16": "queries qkv cosines sines norms", "i64": "positions"}
check(ops_triton.rotate_kernel, kinds, dict(NORMED=True, N=28, H=4, D=128, HALF_PAD=64), 1)
check(ops_triton.gate_kernel, {"bf16": "out gate_up"}, dict(I=18944, TILE=1024))


def check_known(kernel, kinds, *options, **more):
    \"\"\"Check a kernel that has some of these arguments.\"\"\"
    mine = {kind: " ".join(set(names.split()) & set(kernel.arg_names)) for kind, names in kinds.items()}
    check(kernel, mine, *options, **more)


for width, dtype, entropy, capped in (
    (896, torch.bfloat16, True, False), (3584, torch.bfloat16, False, False),
    (2304, torch.bfloat16, True, True), (2568, torch.bfloat16, True, False),
    (900, torch.float16, True, False), (896, torch.float32, True, True),
):
    blocks = Blocks.for_capability(dtype, CAPABILITY // 10)
    kinds = {"fp32": "peaks totals moments target_logits log_totals constants slopes target_gradients"}
    kinds["i64"] = "targets"
    kinds[KINDS[dtype]] = kinds.get(KINDS[dtype], "") + " hidden weight gradient"
    sizes = {name: size for name, size in blocks.constants.items() if name.isupper()} | dict(WIDTH=width)
    for kernel, constants in (
        (head_kernels.sums_kernel, dict(MOMENT=entropy, CAPPED=capped, SPAN=_SPAN)),
        (head_kernels.gradient_kernel, dict(SLOPE=entropy, CAPPED=capped)),
    ):
        # What is spilled is so once a block, after its product.
        spills = 320 if capped else 160
        check_known(kernel, kinds, constants | sizes, blocks.warps, blocks.stages, spills=spills)
for features, kind in ((1536, "bf16"), (128, "bf16"), (8192, "bf16"), (896, "fp32")):
    sizes = _sizes(features)
    kinds = {"fp32": "factors weight_gradients"}
    names = " out x weights x_gradient gradient gates ups gate_gradient up_gradient"
    kinds[kind] = kinds.get(kind, "") + names
    for kernel, constants, warps in (
        (layer_kernels.norm_kernel, sizes, _warps(sizes)),
        (layer_kernels.norm_gradient_kernel, dict(WEIGHT=True, **sizes), _warps(sizes)),
        (layer_kernels.gate_kernel, dict(TILE=_TILE), 4),
        (layer_kernels.gate_gradient_kernel, dict(TILE=_TILE), 4),
    ):
        check_known(kernel, kinds, constants, warps)
"""


def test_kernels_compile():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command, options = [sys.executable, "-c", SCRIPT], {"capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run(command, env=environment, check=False, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
