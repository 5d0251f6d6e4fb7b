"""Jupyter servers for tests, as people have them: at a root of their own, behind a proxy, or a JupyterHub's."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from helpers.notebook import older_packages

__all__ = ["FRONTS", "USER", "serve"]

FRONTS = {
    "lab": ("jupyterlab", "lab/tree", "LabApp"),
    "notebook": ("notebook", "notebooks", "JupyterNotebookApp"),
    "nbclassic": ("nbclassic", "nbclassic/notebooks", None),
}
"""By name: the module, the path of a notebook, and the application that can show itself to a page."""
USER = "somebody"
"""Who may enter the JupyterHub, with any password."""
PREFIX = "/some/prefix/"
PATIENCE = 60
PROXY = "configurable-http-proxy@5.3.0"
HUB = """
import sys
c.JupyterHub.bind_url = "http://127.0.0.1:{port}"
c.JupyterHub.hub_port = {hub}
c.JupyterHub.spawner_class = "simple"
c.JupyterHub.authenticator_class = "dummy"
c.JupyterHub.data_files_path = {shared!r}
c.Authenticator.allow_all = True
c.ConfigurableHTTPProxy.command = [{proxy!r}]
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{other}"
c.Spawner.cmd = [sys.executable, "-m", "jupyterhub.singleuser"]
c.Spawner.args = {arguments!r}
c.Spawner.environment = {environment!r}
c.Spawner.http_timeout = c.Spawner.start_timeout = 60
c.SimpleLocalProcessSpawner.home_dir_template = {folder!r}
"""
"""The configuration of a JupyterHub that starts each user's server as a process of its own."""


@contextlib.contextmanager
def serve(front, folder, environment, place="alone"):
    """Start a Jupyter server; yield the address of the notebook ``book.ipynb`` of a folder in a front end.

    ``place`` is "alone", "prefix" (below a path, behind a proxy), or "hub". Whoever opens a hub logs in.
    """
    module, path, app = FRONTS[front]
    arguments = ["--ServerApp.allow_root=True", f"--ServerApp.root_dir={folder}"]
    arguments += [f"--{app}.expose_app_in_browser=1"] if app else []
    with tempfile.TemporaryDirectory(prefix="nbdist-tests-") as scratch:
        if place == "hub":
            with _hub(Path(scratch), folder, arguments, environment) as address:
                yield f"{address}/hub/spawn?next=/user/{USER}/{path}/book.ipynb"
            return
        base = PREFIX if place == "prefix" else "/"
        arguments += ["--no-browser", "--ServerApp.port=0", "--IdentityProvider.token=secret"]
        arguments += [f"--ServerApp.base_url={base}"]
        command = [sys.executable, "-m", module, *arguments]
        with _run(command, folder / "server.log", environment) as look_for:
            port = look_for(r"http://(?:localhost|127\.0\.0\.1):(\d+)/")
            with contextlib.ExitStack() as proxies:
                if place == "prefix":
                    port = proxies.enter_context(_proxy(Path(scratch), folder, port, environment))
                yield f"http://localhost:{port}{base}{path}/book.ipynb?token=secret"


@contextlib.contextmanager
def _proxy(scratch, folder, port, environment):
    """Run a proxy before the server at a port; yield its own port."""
    [mine, other] = _free_ports(2)
    command = [_npm_proxy(scratch), "--ip", "127.0.0.1", "--port", str(mine), "--api-port", str(other)]
    command += ["--default-target", f"http://127.0.0.1:{port}"]
    with _run(command, folder / "proxy.log", environment) as look_for:
        look_for(r"Proxying http://")
        yield mine


@contextlib.contextmanager
def _hub(scratch, folder, arguments, environment):
    """Run a JupyterHub; yield its address."""
    proxy = _npm_proxy(scratch)
    older_packages.install("jupyterhub", scratch / "hub")
    [port, other, hub] = _free_ports(3)
    shared = str(scratch / "hub" / "share" / "jupyterhub")
    kept = {name: environment[name] for name in environment if name.startswith(("JUPYTER", "NBDIST", "OMP", "IPYTHON"))}
    path = os.pathsep.join(filter(None, [str(scratch / "hub"), environment.get("PYTHONPATH", "")]))
    kept["PYTHONPATH"] = path
    text = HUB.format(
        port=port,
        other=other,
        hub=hub,
        shared=shared,
        proxy=proxy,
        folder=str(folder),
        environment=kept,
        arguments=arguments,
    )
    (scratch / "hub_config.py").write_text(text)
    command = [sys.executable, "-m", "jupyterhub", "-f", str(scratch / "hub_config.py")]
    with _run(command, folder / "server.log", {**environment, "PYTHONPATH": path}, cwd=scratch) as look_for:
        look_for(r"JupyterHub is now running at")
        yield f"http://localhost:{port}"


def _npm_proxy(scratch):
    """The program of JupyterHub's proxy, from npm; the test is skipped where it cannot be had."""
    if not shutil.which("npm"):
        pytest.skip("there is no npm here")
    command = ["npm", "install", "--silent", "--prefix", str(scratch / "npm"), PROXY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if done.returncode:
        pytest.skip(f"{PROXY} cannot be had: {done.stderr[-300:]}")
    return str(scratch / "npm" / "node_modules" / ".bin" / "configurable-http-proxy")


def _free_ports(count):
    """Ports on which nothing listens now, for programs that cannot choose one themselves."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


@contextlib.contextmanager
def _run(command, log, environment, cwd=None):
    """Run a server; yield a function that waits for a pattern in what it has said, and returns its first group."""
    with log.open("w") as told:
        server = subprocess.Popen(command, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=told, stderr=told)

    def look_for(pattern):
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, log.read_text())):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return found[1] if found.groups() else found[0]

    try:
        yield look_for
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        if server.poll() is None:
            server.kill()
            server.wait()
