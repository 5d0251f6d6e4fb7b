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
    def here(value):
        named = isinstance(value, str) and value.startswith("cuda")
        index = isinstance(value, int) and not isinstance(value, bool)
        return "cpu" if named or index or (isinstance(value, torch.device) and value.type == "cuda") else value

    def on_the_cpu(to):
        return lambda self, *args, **kwargs: to(self, *map(here, args), **{key: here(kwargs[key]) for key in kwargs})

    for cls in (torch.Tensor, torch.nn.Module):
        cls.to = on_the_cpu(cls.to)
        cls.cuda = lambda self, *args, **kwargs: self
    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: 2
    torch.accelerator.current_accelerator = lambda *args, **kwargs: torch.device("cpu")
    torch.accelerator.device_index = lambda index: None


sys.meta_path.insert(0, _AfterTorch())
