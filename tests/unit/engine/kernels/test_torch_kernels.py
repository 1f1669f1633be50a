"""TorchKernels keep their promise of exact rows where the probe says that they do; the choice of kernels."""

import os
import subprocess
import sys

import pytest
import torch
from unison.engine.kernels import NativeKernels, TorchKernels, select_kernels
from unison.engine.kernels.build import library
from unison.engine.kernels.torch_kernels import probe_recipe


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_exact_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """R3: by the recipe of row blocks."""
    kernels = TorchKernels(exact=True)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 192, generator=generator).to(dtype)
    w = (torch.randn(96, 192, generator=generator) * 0.1).to(dtype)
    whole = kernels.linear(x, w)
    assert probe_recipe("cpu", dtype, 96, 192).holds and kernels.exact
    for m in [*range(1, 40), 64, 65, 129, 256, 257]:
        assert torch.equal(kernels.linear(x[:m], w), whole[:m]), f"M = {m}"
    for m in (1, 5, 33):
        assert torch.equal(kernels.logits(x[:m], w), kernels.logits(x, w)[:m])
        assert torch.equal(kernels.silu_mul(x[:m, :100]), kernels.silu_mul(x[:, :100])[:m])
        assert torch.equal(kernels.row_logsumexp(x[:m].float()), kernels.row_logsumexp(x.float())[:m])


@pytest.mark.parametrize("shape", [(64, 64), (64, 96), (128, 64), (259, 48), (96, 192)])
def test_the_probe_sees_another_order_of_addition(shape: tuple[int, int]) -> None:
    """R3: a recipe is chosen per shape, by sums that cancel: on some machines one row of a small matrix is added up in
    another order, which random operands show in one row of some hundred only."""
    kernels = TorchKernels(exact=True)
    n, k = shape
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(2048, k, generator=generator)).bfloat16()
    w = (torch.randn(n, k, generator=generator) * 0.15).bfloat16()
    whole = kernels.linear(x, w)
    single = torch.cat([kernels.linear(x[at : at + 1], w) for at in range(len(x))])
    assert torch.equal(single, whole)


def test_describe_names_the_recipe() -> None:
    kernels = TorchKernels(exact=True)
    kernels.linear(torch.zeros(1, 8), torch.zeros(1, 8))
    assert "cpu torch.float32 (1, 8)" in kernels.describe()["gemm_blocks"]
    assert TorchKernels(exact=False).exact is False


def test_wrong_operands_are_refused() -> None:
    kernels = TorchKernels()
    with pytest.raises(TypeError, match="one dtype"):
        kernels.linear(torch.zeros(2, 8), torch.zeros(2, 8).bfloat16())
    with pytest.raises(ValueError, match="K"):
        kernels.logits(torch.zeros(2, 8), torch.zeros(2, 9))


def test_selection() -> None:
    assert select_kernels("cpu", "torch", exact=False).describe()["exact"] is False
    assert isinstance(select_kernels("cpu"), NativeKernels if library() is not None else TorchKernels)
    with pytest.raises(ValueError, match="auto, native, torch"):
        select_kernels("cpu", "fast")
    with pytest.raises(ValueError, match="CPU"):
        select_kernels("cuda", "native")
    assert isinstance(select_kernels("cuda"), TorchKernels)


@pytest.mark.skipif(library() is None, reason="no native kernels here")
def test_linear_can_be_left_to_torch() -> None:
    mixed, plain, torch_kernels = NativeKernels(linear="onednn"), NativeKernels(), TorchKernels(exact=True)
    x, w = torch.randn(5, 64).bfloat16(), torch.randn(7, 64).bfloat16()
    assert torch.equal(mixed.linear(x, w), torch_kernels.linear(x, w))
    assert torch.equal(mixed.logits(x, w), plain.logits(x, w))
    assert mixed.describe()["bf16_linear"] == "torch row blocks"


@pytest.mark.slow
@pytest.mark.slow
def test_native_code_can_be_turned_off() -> None:
    """P50: the switch does what it says, an unknown value is named, and asking for native code then is an error."""
    program = (
        "from unison.engine.kernels import select_kernels; from unison.engine.kernels.build import why_unavailable\n"
        "print(select_kernels('cpu').name, '|', why_unavailable())\n"
        "try: select_kernels('cpu', 'native')\n"
        "except RuntimeError as error: print(error)\n"
    )
    for value, expected in (("torch", "turned off by UNISON_KERNELS=torch"), ("fast", "takes 'native' or 'torch'")):
        environment = {**os.environ, "UNISON_KERNELS": value}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("torch |") and done.stdout.count(expected) == 2
