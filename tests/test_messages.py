"""Each error that the package raises on purpose, and each of its warnings, is provoked by a test.

``docs/messages.json`` has an example of each message, as a test provoked it: `python docs/make_messages.py TESTS`
records the messages of TESTS. A message without an example is in NOT_PROVOKED.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"

NOT_PROVOKED = {
    "a table with all forwards first can always be run": "only a bug in the schedules could raise it",
    "nbdist needs a Python with a GIL, and this one is free-threaded: use python3.13, not python3.13t": "elsewhere",
    "nbdist runs on Linux, and this is …: WSL2 and Docker work": "elsewhere",
}
"""The messages that no test can provoke, by their template, and why."""


@pytest.fixture
def messages(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("messages")


def test_each_message_has_an_example_or_a_reason(messages):
    examples = messages.examples()
    missing = [
        f"{kind}: {template}"
        for kind, templates in messages.templates().items()
        for template in templates - set(examples.get(kind, {})) - set(NOT_PROVOKED)
    ]
    assert not missing, "provoke these in a test TEST, and run `python docs/make_messages.py TEST`, then make_pages.py"


def test_each_example_is_of_a_message_of_the_package(messages):
    templates = messages.templates()
    for kind, of_kind in messages.examples().items():
        assert not set(of_kind) - templates[kind], "run `python docs/make_messages.py`"
        for template, example in of_kind.items():
            assert messages.matches(example, template), example


def test_each_exception_is_a_message_without_example(messages):
    assert set(NOT_PROVOKED) <= set().union(*messages.templates().values())
    assert not set(NOT_PROVOKED) & set().union(*messages.examples().values())


def test_a_message_without_example_is_found(messages, tmp_path, monkeypatch):
    (tmp_path / "module.py").write_text('def f(x):\n    raise UsageError(f"{x} is not a fruit")\n')
    monkeypatch.setattr(messages, "PACKAGE", tmp_path)
    monkeypatch.setattr(messages, "error_classes", lambda: {"UsageError": ""})
    assert messages.templates() == {"UsageError": {"… is not a fruit"}}
    with pytest.raises(AssertionError, match=r"provoke these in a test"):
        test_each_message_has_an_example_or_a_reason(messages)


def test_an_instrumented_module_passes_its_messages_to_the_recorder(messages):
    make_messages = importlib.import_module("make_messages")
    source = 'def f(x):\n    raise ValueError(\n        f"no {x} for"\n        f" {x}"\n    )\n'
    made = make_messages.instrument(source, {})
    assert "'ValueError', 'no … for …'" in made
    assert made.count("\n") == source.count("\n")
    recorder = type("Recorder", (), {"record": staticmethod(lambda kind, template, text: text.upper())})
    names: dict[str, Any] = {"__builtins__": {"__import__": lambda *_, **__: recorder, "ValueError": ValueError}}
    exec(made, names)
    with pytest.raises(ValueError, match="NO PLUM FOR PLUM"):
        names["f"]("plum")
