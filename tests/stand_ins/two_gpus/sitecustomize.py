"""Stands in for two GPUs: what a program puts on one of them stays on the CPU.

Python imports a module of this name when it starts, so that the program and every process that it spawns get the
stand-in. The names of devices are changed where the programs give them: ``to``, ``cuda`` and ``torch.accelerator``.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder


class _AfterTorch(MetaPathFinder):
    """Finds torch where everybody else finds it, and changes it when it has been executed."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module):
            loader.exec_module = execute
            execute(module)
            _stay_on_the_cpu(module)

        loader.exec_module = exec_module
        return spec


def _stay_on_the_cpu(torch):
    def is_gpu(value):
        index = isinstance(value, int) and not isinstance(value, bool)
        device = isinstance(value, torch.device) and value.type == "cuda"
        return index or device or (isinstance(value, str) and value.startswith("cuda"))

    def on_the_cpu(to, result):
        def stand_in(self, *args, **kwargs):
            moves = any(map(is_gpu, [*args, *kwargs.values()]))
            kwargs = {key: "cpu" if is_gpu(value) else value for key, value in kwargs.items()}
            moved = to(self, *("cpu" if is_gpu(value) else value for value in args), **kwargs)
            return result(moved) if moves else moved

        return stand_in

    # A tensor is copied, as it would be to a GPU: programs go on to write into the tensor that they sent there.
    torch.Tensor.to = on_the_cpu(torch.Tensor.to, torch.Tensor.clone)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self.clone()
    torch.nn.Module.to = on_the_cpu(torch.nn.Module.to, lambda module: module)
    torch.nn.Module.cuda = lambda self, device=None: self
    answers = {
        "is_available": True,
        "device_count": 2,
        "current_accelerator": torch.device("cpu"),
        "device_index": None,
    }
    for name, answer in answers.items():
        setattr(torch.accelerator, name, _for_programs(getattr(torch.accelerator, name), answer))


def _for_programs(function, answer):
    """Return a function that answers a program so, and torch's own modules, such as its compiler, as it did before."""

    def stand_in(*args, **kwargs):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return function(*args, **kwargs) if caller.partition(".")[0] == "torch" else answer

    return stand_in


sys.meta_path.insert(0, _AfterTorch())
