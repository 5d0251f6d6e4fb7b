"""A stand-in for the clock of a GPU: all tensors count as on a GPU, which lags behind until the test lets it go on."""

import threading

import torch

from nbdist.gpus import spans

SECONDS = 0.0031


class LateGpu:
    """What the GPU has been asked to measure, and whether it has come to that."""

    def __init__(self, monkeypatch):
        self.goes_on = threading.Event()
        self.fails = False
        self.begun = []
        self.ended = 0
        self.one_by_one = False
        """True if a span is over only at the second look, so that those of a worker are over one after another."""
        gpu = self

        class Span:
            def __init__(self, device):
                gpu.begun.append(device)
                self.looks = 0

            def end(self):
                gpu.ended += 1
                return self

            def is_over(self):
                self.looks += gpu.goes_on.is_set()
                return gpu.fails or self.looks > gpu.one_by_one

            @property
            def seconds(self):
                assert self.is_over()
                return None if gpu.fails else SECONDS

        def device_of(values):
            return torch.device("cuda:0") if any(isinstance(value, torch.Tensor) for value in values) else None

        monkeypatch.setattr(spans, "CUDA_IS_BUILT", True)
        monkeypatch.setattr(spans, "GpuSpan", Span)
        monkeypatch.setattr(spans, "device_of", device_of)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
