"""A process that has imported torch and runs pieces of code, each in a child that it forks.

It reads one JSON line a piece from its standard input and answers with one. Importing torch once rather than
for every test saves seconds a test.
"""

import json
import os
import sys
import tempfile
import types


def run_forked(code):
    """What `code` printed in a child, and the child's exit code."""
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if not child:
            status = 1
            try:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                main = sys.modules["__main__"] = types.ModuleType("__main__")
                exec(compile(code, "<test>", "exec"), vars(main))
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        file.seek(0)
        return file.read().decode(), os.waitstatus_to_exitcode(status)


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    import torch.distributed.optim  # noqa: F401

    import nbdist.testing  # noqa: F401  # these are what takes long

    for line in sys.stdin:
        print(json.dumps(run_forked(json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
