"""Drives a notebook kernel as a front end does: every channel, real processes."""

import contextlib
import os
import pathlib
import queue
import re
import signal
import sys
import time

from jupyter_client.manager import KernelManager

import nbdist
from helpers.suite.python_path import python_path

BLIND = os.environ.get("NBDIST_TEST_BLIND_PATH", "")
"""The folder of a launcher whose pids mean nothing, if notebooks are to use it: see tests/cluster/test_launchers.py."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Executed:
    """What one cell gave: its reply, and every message that belongs to it."""

    def __init__(self, msg_id):
        self.msg_id = msg_id
        self.messages = []
        self.reply = None
        self.idle = False

    def of(self, kind):
        return [message["content"] for message in self.messages if message["msg_type"] == kind]

    @property
    def name(self):
        """What the notebook calls the cell, such as In[3]."""
        return f"In[{self.of('execute_input')[0]['execution_count']}]"

    @property
    def stdout(self):
        return "".join(c["text"] for c in self.of("stream") if c["name"] == "stdout")

    @property
    def stderr(self):
        return "".join(c["text"] for c in self.of("stream") if c["name"] == "stderr")

    @property
    def line(self):
        """The one line below the cell that says where workers stand, as it is now; empty if there is none."""
        lines = [m for m in self.messages if m["msg_type"] in ("display_data", "update_display_data")]
        assert sum(m["msg_type"] == "display_data" for m in lines) <= 1
        return lines[-1]["content"]["data"]["text/plain"] if lines else ""

    @property
    def result(self):
        results = self.of("execute_result")
        return results[-1]["data"]["text/plain"] if results else None

    @property
    def value(self):
        """What shows the cell's value, by MIME type: its result, or a live view and the picture that is saved of it."""
        results = self.of("execute_result")
        return results[-1]["data"] if results else {kind: data for each in self.displays for kind, data in each.items()}

    @property
    def displays(self):
        return [content["data"] for content in self.of("display_data")]

    @property
    def error(self):
        errors = self.of("error")
        return errors[-1] if errors else None

    @property
    def traceback(self):
        return COLOUR.sub("", "\n".join(self.error["traceback"])) if self.error else ""

    def __repr__(self):
        return f"<{[(m['msg_type'], m['content']) for m in self.messages]} {self.reply and self.reply['content']}>"


class Notebook:
    """A kernel and the front end's side of it."""

    def __init__(self, *, load=True, env=None, watched=True, cwd=None, folders=()):
        self.watched = watched
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "IPYTHONDIR": os.environ["NBDIST_RUNTIME_DIR"] + "/ipython",
        }
        environment.pop("PYTEST_CURRENT_TEST", None)  # by which kernels see that they are tested, and behave otherwise
        environment |= python_path(*folders, BLIND, os.environ.get("NBDIST_TEST_KERNEL_PATH", ""))
        self._start({**environment, **(env or {})}, cwd)
        self.cells = {}
        self.comms = []
        """Whatever widgets have sent, for whichever cell."""
        self.answers = []
        self.pid = self.manager.provisioner.pid
        self._stacks = pathlib.Path(os.environ["NBDIST_RUNTIME_DIR"], f"stacks-{self.pid}")
        self._prepare()
        if load:
            self.run("%load_ext nbdist")

    def _start(self, environment, cwd):
        """Start the kernel; try again if it ends at once, as it does when a program takes a port chosen for it."""
        for left in (2, 1, 0):
            self.manager = KernelManager(kernel_name="python3")
            self.manager.kernel_spec.argv[0] = sys.executable
            self.manager.start_kernel(env=environment, cwd=cwd, extra_arguments=["--HistoryManager.enabled=False"])
            self.client = self.manager.client()
            self.client.start_channels()
            try:
                self.client.wait_for_ready(timeout=60)
                return
            except RuntimeError as error:
                if not left or "Kernel died" not in str(error):
                    raise
                self.client.stop_channels()
                self.manager.shutdown_kernel(now=True)

    def _prepare(self):
        """Be sure which nbdist runs; be able to say where it is; fold lines that are alike on any slow machine."""
        where = f"open({str(self._stacks)!r}, 'w')"
        self.run(
            f"assert __import__('nbdist').__file__ == {nbdist.__file__!r}, __import__('nbdist').__file__\n"
            f"__import__('faulthandler').register({int(signal.SIGUSR1)}, file={where}, all_threads=True)\n"
            "__import__('nbdist.cluster.output.arranger', fromlist=['_']).FOLD_AFTER = 5",
            silent=True,
        )

    # -- cells ----------------------------------------------------------------------------------

    def send(self, code, **options):
        options.setdefault("allow_stdin", self.watched)
        if BLIND:
            code = re.sub(r"^( *%dist_init\b)(?!.*--launcher|\?)", r"\1 --launcher blind", code, flags=re.MULTILINE)
        self.client.allow_stdin = self.watched
        cell = Executed(self.client.execute(code, **options))
        self.cells[cell.msg_id] = cell
        return cell

    def run(self, code, timeout=60, check=True, **options):
        """Execute a cell and wait for its end; its error is raised unless ``check`` is false.

        ipykernel 6 drops a request that comes right after the end of a cell that failed. It is sent again.
        """
        cell = self.send(code, **options)
        self.finish(cell, timeout)
        while cell.reply["content"]["status"] == "aborted":
            cell = self.send(code, **options)
            self.finish(cell, timeout)
        if check and cell.reply["content"]["status"] != "ok":
            raise AssertionError(
                f"{code!r} failed: {COLOUR.sub('', chr(10).join(cell.reply['content'].get('traceback', [])))}"
            )
        return cell

    def end_all(self):
        """End the cells that run, and leave idle workers in a process group that works."""
        for cell in self.cells.values():
            if not cell.idle:
                os.kill(self.pid, signal.SIGINT)
                self.finish(cell)
        self.run("%dist_restart -p", check=False)

    def finish(self, cell, timeout=60):
        self.until(lambda: cell.idle and cell.reply is not None, timeout, "the end of", cell)

    def until(self, condition, timeout=30, what="what was awaited", cell=None):
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                what = what if cell is None else f"{what} {cell}"
                raise AssertionError(f"{what} did not come within {timeout} s\n{self.stacks()}")
            self.pump(0.05)

    def stacks(self):
        """Where every thread of the kernel is, the main thread first, for whoever reads why a test failed."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.5)
            return "\n\n".join(reversed(self._stacks.read_text().split("\n\n")))  # some reports cut the end off
        return "(the kernel is gone)"

    def pump(self, wait=0.0):
        """Take what has come."""
        with contextlib.suppress(queue.Empty):
            self._on_output(self.client.get_iopub_msg(timeout=wait))
            while True:
                self._on_output(self.client.get_iopub_msg(timeout=0))
        with contextlib.suppress(queue.Empty):
            while True:
                reply = self.client.get_shell_msg(timeout=0)
                cell = self.cells.get(reply["parent_header"].get("msg_id"))
                if cell is not None:
                    cell.reply = reply
        with contextlib.suppress(queue.Empty):
            while True:
                request = self.client.get_stdin_msg(timeout=0)
                self.client.input(self.answers.pop(0)(request["content"]))

    def _on_output(self, message):
        if message["msg_type"].startswith("comm_"):
            self.comms.append(message)
        cell = self.cells.get(message["parent_header"].get("msg_id"))
        if cell is None:
            return
        if message["msg_type"] == "status":
            cell.idle = message["content"]["execution_state"] == "idle"
        cell.messages.append(message)

    # -- the rest of a front end ----------------------------------------------------------------

    def interrupt(self):
        self.manager.interrupt_kernel()

    def complete(self, code, cursor=None, timeout=20):
        reply = self.client.complete(code, cursor if cursor is not None else len(code), reply=True, timeout=timeout)
        return reply["content"]

    def inspect(self, code, cursor=None, timeout=20):
        reply = self.client.inspect(code, cursor if cursor is not None else len(code), reply=True, timeout=timeout)
        return reply["content"]

    def restart(self):
        """What the restart button does."""
        self.manager.restart_kernel()
        self.client.wait_for_ready(timeout=60)
        self.pid = self.manager.provisioner.pid

    def kill(self):
        """End the kernel as an out-of-memory killer would."""
        self.manager.shutdown_kernel(now=True)
        self.client.stop_channels()

    def close(self):
        with contextlib.suppress(Exception):
            self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
