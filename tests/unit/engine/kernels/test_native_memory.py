"""What the native kernels touch: not a byte past the end of an operand, and nothing that fails a check."""

import ctypes
import mmap

import pytest
import torch
from unison.engine.kernels import NativeKernels
from unison.engine.kernels.adamw import AdamWRates, AdamWRun, adamw_, sum_of_squares
from unison.engine.kernels.build import library

pytestmark = pytest.mark.skipif(library() is None, reason="no native kernels here")

PAGE = mmap.PAGESIZE
PROT_NONE = 0


class GuardedMemory:
    """A mapping whose last page can't be touched; tensors are placed so that they end where it begins."""

    def __init__(self, num_bytes: int) -> None:
        self.size = (num_bytes + PAGE - 1) // PAGE * PAGE
        self.map = mmap.mmap(-1, self.size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        libc = ctypes.CDLL(None, use_errno=True)
        end = ctypes.c_void_p(self.base + self.size)
        assert libc.mprotect(end, ctypes.c_size_t(PAGE), PROT_NONE) == 0

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        count = tensor.numel()
        offset = self.size - count * tensor.element_size()
        placed = torch.frombuffer(self.map, dtype=tensor.dtype, count=count, offset=offset).view(tensor.shape)
        return placed.copy_(tensor)


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    return GuardedMemory(tensor.numel() * tensor.element_size()).place(tensor)


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return NativeKernels()


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])


@DTYPES
@pytest.mark.parametrize("k", [1, 7, 8, 15, 16, 17, 33, 1601])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 13])
def test_linear_never_reads_or_writes_past_an_end(kernels: NativeKernels, dtype: torch.dtype, m: int, k: int) -> None:
    """A byte too far is a segmentation fault, which no test survives."""
    for n in (1, 4, 7, 9, 21):
        x, w, bias = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
        out = guarded(torch.zeros(m, n, dtype=dtype))
        kernels.linear(guarded(x), guarded(w), guarded(bias), out)
        assert torch.equal(out, kernels.linear(x, w, bias))
        wide = guarded(torch.zeros(m, n))
        assert torch.equal(kernels.logits(guarded(x), guarded(w), wide), kernels.logits(x, w))
        if n % 2 == 0:
            half = guarded(torch.zeros(m, n // 2, dtype=dtype))
            kernels.linear_silu_mul(guarded(x), guarded(w), guarded(bias), half)
            assert torch.equal(half, kernels.linear_silu_mul(x, w, bias))


@DTYPES
@pytest.mark.parametrize("width", [2, 6, 16, 18, 30, 66])
def test_row_operations_never_touch_past_an_end(kernels: NativeKernels, dtype: torch.dtype, width: int) -> None:
    x, weight = torch.randn(3, width).to(dtype), torch.randn(width).to(dtype)
    residual = guarded(x.clone())
    out = guarded(torch.zeros_like(x))
    kernels.add_rms_norm(residual, guarded(x), guarded(weight), 1e-5, out)
    assert torch.equal(out, kernels.rms_norm(x + x, weight, 1e-5))
    half = guarded(torch.zeros(3, width // 2, dtype=dtype))
    assert torch.equal(kernels.silu_mul(guarded(x), half), kernels.silu_mul(x))
    cos, sin = guarded(torch.randn(3, width // 2)), guarded(torch.randn(3, width // 2))
    q, k = guarded(x.clone().view(3, 1, width)), guarded(x.clone().view(3, 1, width))
    kernels.rope_(q, k, cos, sin)
    assert torch.equal(q, k)
    logits = guarded(torch.randn(3, width))
    targets = guarded(torch.zeros(3, dtype=torch.int64))
    assert torch.equal(kernels.row_logprobs(logits, targets), kernels.row_logprobs(logits.clone(), targets.clone()))


@DTYPES
@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 31, 1029])
def test_updates_never_touch_past_an_end(dtype: torch.dtype, count: int) -> None:
    state = [torch.randn(count), torch.randn(count), torch.randn(count), torch.rand(count)]
    rates, out = AdamWRates(0.01, 0.9, 0.99, 1e-8, 1), torch.zeros(count, dtype=dtype)
    at_ends, plain = [guarded(each) for each in (*state, out)], [each.clone() for each in (*state, out)]
    adamw_([AdamWRun(*at_ends)], rates)
    adamw_([AdamWRun(*plain)], rates)
    assert all(torch.equal(one, other) for one, other in zip(at_ends, plain, strict=True))
    assert sum_of_squares(at_ends[0]) == sum_of_squares(plain[0])


def test_a_target_outside_the_vocabulary_gives_nan_and_reads_nothing(kernels: NativeKernels) -> None:
    got = kernels.row_logprobs(guarded(torch.zeros(3, 5)), torch.tensor([5, -1, 4]))
    assert got[0].isnan() and got[1].isnan() and got[2].isfinite()


M = torch.zeros(3, 8)
REFUSED = [
    (TypeError, lambda k: k.linear(M.half(), M.half())),
    (TypeError, lambda k: k.linear(M, M.bfloat16())),
    (TypeError, lambda k: k.linear(M, M, torch.zeros(3, dtype=torch.bfloat16))),
    (TypeError, lambda k: k.linear(M, M, None, torch.zeros(3, 3, dtype=torch.bfloat16))),
    (TypeError, lambda k: k.linear(M.to("meta"), M)),
    (TypeError, lambda k: k.linear(M, M.to("meta"))),
    (ValueError, lambda k: k.linear(M, torch.zeros(3, 9))),
    (ValueError, lambda k: k.linear(M[:, :0], M[:, :0])),
    (ValueError, lambda k: k.linear(M[0], M)),
    (ValueError, lambda k: k.linear(torch.zeros(8, 3).t(), M)),
    (ValueError, lambda k: k.linear(M, torch.zeros(8, 3).t())),
    (ValueError, lambda k: k.linear(M, M, torch.zeros(4))),
    (ValueError, lambda k: k.linear(M, M, torch.zeros(6)[::2])),
    (ValueError, lambda k: k.linear(M, M, None, torch.zeros(3, 4))),
    (ValueError, lambda k: k.linear(M, M, None, torch.zeros(1, 3).expand(3, 3))),
    (ValueError, lambda k: k.linear(M, M, None, torch.zeros(3, 3).t())),
    (TypeError, lambda k: k.logits(M.bfloat16(), M.bfloat16(), torch.zeros(3, 3, dtype=torch.bfloat16))),
    (ValueError, lambda k: k.rms_norm(M, torch.zeros(7), 1e-5)),
    (TypeError, lambda k: k.rms_norm(M, torch.zeros(8, dtype=torch.bfloat16), 1e-5)),
    (ValueError, lambda k: k.add_rms_norm(torch.zeros(2, 8), M, torch.zeros(8), 1e-5)),
    (TypeError, lambda k: k.add_rms_norm(M.bfloat16(), M, torch.zeros(8), 1e-5)),
    (ValueError, lambda k: k.silu_mul(torch.zeros(3, 7))),
    (ValueError, lambda k: k.linear_silu_mul(torch.zeros(3, 7), torch.zeros(5, 7))),
    (ValueError, lambda k: k.linear_silu_mul(torch.zeros(3, 7), torch.zeros(4, 7), out=torch.zeros(3, 4))),
    (TypeError, lambda k: k.silu_mul(torch.zeros(3, 8, dtype=torch.int32))),
    (TypeError, lambda k: k.rope_(M[:, None], M[:, None], M[:, :4].bfloat16(), M[:, :4])),
    (ValueError, lambda k: k.rope_(M[:, None], M[:, None], M[:, :5], M[:, :5])),
    (ValueError, lambda k: k.rope_(M[:, None], M[:, None], M[:2, :4], M[:2, :4])),
    (ValueError, lambda k: k.rope_(M[:, None], M[:, None], M[:, :4], M[:, :3])),
    (ValueError, lambda k: k.rope_(M[:, None].expand(3, 2, 8), M[:, None], M[:, :4], M[:, :4])),
    (TypeError, lambda k: k.row_logprobs(M.bfloat16(), torch.zeros(3, dtype=torch.int64))),
    (TypeError, lambda k: k.row_logprobs(M, torch.zeros(3, dtype=torch.int32))),
    (ValueError, lambda k: k.row_logprobs(M, torch.zeros(2, dtype=torch.int64))),
    (ValueError, lambda k: k.row_logsumexp(M[:, :0])),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_wrong_arguments_are_refused_before_any_pointer_is_used(kernels: NativeKernels, case: int) -> None:
    kind, call = REFUSED[case]
    with pytest.raises(kind):
        call(kernels)


def test_no_rows_are_no_work(kernels: NativeKernels) -> None:
    none, weight = torch.zeros(0, 8), torch.zeros(3, 8)
    assert kernels.linear(none, weight).shape == (0, 3) and kernels.logits(none, weight).shape == (0, 3)
    assert kernels.linear(weight, none).shape == (3, 0)
    assert kernels.rms_norm(none, torch.zeros(8), 1e-5).shape == (0, 8) and kernels.silu_mul(none).shape == (0, 4)
    assert kernels.row_logprobs(none, torch.zeros(0, dtype=torch.int64)).shape == (0,)
    kernels.rope_(none[:, None], none[:, None], none[:, :4], none[:, :4])
