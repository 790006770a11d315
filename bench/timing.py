"""How it is measured: rounds in which every contender runs once, each time behind another one."""

import time

import torch

ROUNDS = 7
_CPU_SECONDS = 0.03  # a contender's turn in a round: long against the clock and the scheduler
_CUDA_SECONDS = 0.005
_CUDA_CALLS = 10
_MATMUL_SIZE = 8192
MATMUL_FLOPS = 2 * _MATMUL_SIZE**3


def measure(
    calls: dict, device: str, rounds: int = ROUNDS, fewest: int = _CUDA_CALLS
) -> dict[str, list[float]]:
    """Seconds per call of each contender, one number a round; on a GPU each of at least so many calls."""
    turns = {
        name: _CudaTurn(call, fewest) if device == "cuda" else _CpuTurn(call) for name, call in calls.items()
    }
    seconds = {name: [] for name in calls}
    for i in range(rounds):
        for name in order_of_round(list(calls), i):
            seconds[name].append(turns[name].run())
    return seconds


def order_of_round(names: list, i: int) -> list:
    """In as many rounds as there are names (twice as many, if they are odd) each follows each other as often.

    A turn may leave something to the next one, such as a clock that the power it drew has slowed: were the
    order only rotated, each would always run behind the same one. Williams (1949), "Experimental designs
    balanced for the estimation of residual effects of treatments".
    """
    n = len(names)
    order = [names[((k + 1) // 2 * (1 if k % 2 else -1) + i) % n] for k in range(n)]
    return order[::-1] if n % 2 and i // n % 2 else order


class _CpuTurn:
    def __init__(self, call):
        self.call, self.count = call, 1
        self.count = max(1, round(_CPU_SECONDS / self.run()))

    def run(self) -> float:
        start = time.perf_counter()
        for _ in range(self.count):
            self.call()
        return (time.perf_counter() - start) / self.count


class _CudaTurn:
    """Several calls in one CUDA graph: the time of the kernels, without the CPU's."""

    def __init__(self, call, fewest: int):
        once = self._elapsed(call)
        self.count = min(200, max(fewest, round(_CUDA_SECONDS / once)))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
            for _ in range(self.count):
                call()
        self.run()

    def run(self) -> float:
        return self._elapsed(self.graph.replay) / self.count

    @staticmethod
    def _elapsed(run) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3


def eager_cpu_seconds(call, count: int = 10) -> float:
    """CPU time of issuing one call to a GPU: the least of three goes, each on an idle device."""
    goes = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        goes.append((time.perf_counter() - start) / count)
    torch.cuda.synchronize()
    return min(goes)


def make_matmul(dtype):
    """cuBLAS on 8192 x 8192 matrices, the yardstick of the device."""
    a, b, c = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device="cuda", dtype=dtype) for _ in range(3))
    return lambda: torch.mm(a, b, out=c)


def copy_bytes_per_second() -> float:
    """Bytes read and written by a device copy of 1 GiB, the best of five."""
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / min(_CudaTurn._elapsed(lambda: target.copy_(source)) for _ in range(5))
