"""The thread pool of the native kernels: any caller, any number of threads, and after a fork."""

import os
import threading

import pytest
import torch
from unison.engine.kernels import NativeKernels
from unison.engine.kernels.build import library

pytestmark = pytest.mark.skipif(library() is None, reason="no native kernels here")


@pytest.fixture
def kernels() -> NativeKernels:
    kernels = NativeKernels()
    before = kernels.num_threads
    yield kernels
    kernels.set_num_threads(before)


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_threads_come_and_go(kernels: NativeKernels) -> None:
    kernels.set_num_threads(1)
    alone = count_threads()
    for count in (4, 2, 7, 1):
        assert kernels.set_num_threads(count) == count == kernels.num_threads
        assert count_threads() == alone + count - 1
    with pytest.raises(ValueError, match="1 to 256"):
        kernels.set_num_threads(0)
    with pytest.raises(ValueError, match="1 to 256"):
        kernels.set_num_threads(257)


def test_callers_from_many_threads_get_their_own_results(kernels: NativeKernels) -> None:
    """More helpers than cores, more callers than helpers, thread count changed meanwhile."""
    w = torch.randn(200, 64)
    inputs = [torch.randn(m, 64) for m in range(1, 9)]
    expected = [kernels.linear(x, w) for x in inputs]
    failures: list[int] = []

    def call(i: int) -> None:
        for _ in range(100):
            if not torch.equal(kernels.linear(inputs[i], w), expected[i]):
                failures.append(i)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for caller in callers:
        caller.start()
    for count in (3, 1, 4, 2):
        kernels.set_num_threads(count)
    for caller in callers:
        caller.join(timeout=120)
    assert not any(caller.is_alive() for caller in callers) and not failures


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_builds_its_own_helpers(kernels: NativeKernels) -> None:
    kernels.set_num_threads(3)
    x, w = torch.randn(5, 64), torch.randn(500, 64)
    expected = kernels.linear(x, w)
    child = os.fork()
    if child == 0:
        is_same = torch.equal(kernels.linear(x, w), expected)
        os._exit(0 if is_same and kernels.num_threads == 3 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(kernels.linear(x, w), expected)
