"""Records the messages that tests provoke, and writes an example of each message into ``messages.json``.

    python docs/make_messages.py tests/wire tests/rpc/test_api.py

The tests run with a copy of the package, in ``build/messages``, in which each message passes through `record` of
``message_recorder.py``. The processes that tests start import the same copy, which is first on PYTHONPATH. An example
stays as long as its message does. Without tests, the program adds what was recorded before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # it is missing under PYTHONSAFEPATH
import messages

COPY = messages.ROOT / "build" / "messages"
RECORDED = COPY / "recorded"

PLACEHOLDERS = [
    (re.escape(str(COPY)), "/home/me"),
    (re.escape(str(messages.ROOT)), "/home/me"),
    (r"/tmp/nbdist-tests-\w+", "/run/user/1000"),
    (r"/tmp/(?:nbd-|nbdist-|tmp|pytest-)[\w-]+", "/tmp/folder"),
    (r"/proc/\d+", "/proc/4242"),
    (r"(127\.0\.0\.1|localhost|::1\]):\d+", r"\1:29500"),
    (r"\b(pid|process) \d+", r"\1 4242"),
    (r"0x[0-9a-f]{6,}", "0x7f0123456789"),
    (r"\b[0-9a-f]{32,}\b", "0123456789abcdef"),
]
"""What differs from one recording to the next, as regular expressions, and what an example has in its place."""

DULL = re.compile(r"''|\[\]|\b0 s\b|[^ -~\n…]")
"""Values that say little: empty ones, no time at all, odd letters."""


def instrument(source: str, classes: dict[str, str]) -> str:
    """Return a module's source with a call of `record` around each message. No line gets another number."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    inserted: list[tuple[int, str]] = []
    for message in messages.in_module(source, classes):
        text = message.text
        assert text.end_lineno is not None
        assert text.end_col_offset is not None
        call = f"__import__('nbdist.message_recorder', fromlist=['_']).record({message.kind!r}, {message.template!r}, "
        inserted.append((starts[text.lineno - 1] + text.col_offset, call))
        inserted.append((starts[text.end_lineno - 1] + text.end_col_offset, ")"))
    made = source.encode()
    for at, new in sorted(inserted, reverse=True):
        made = made[:at] + new.encode() + made[at:]
    return made.decode()


def copy() -> None:
    """Make the instrumented copy of the package."""
    package = COPY / "nbdist"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(messages.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    classes = messages.error_classes()
    for path in package.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        path.write_text(instrument(source, classes), encoding="utf-8")
    shutil.copy(messages.HERE / "message_recorder.py", package)
    RECORDED.mkdir(exist_ok=True)


def run(tests: list[str]) -> int:
    """Run tests with the instrumented copy, and return pytest's exit status."""
    environment = {**os.environ, "PYTHONPATH": str(COPY), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "pytest", *tests], env=environment, cwd=messages.ROOT).returncode


def recorded() -> dict[tuple[str, str], set[str]]:
    """Return the texts that were recorded, by their kind and template, without what differs from run to run."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in RECORDED.iterdir():
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            text = entry["text"]
            for pattern, constant in PLACEHOLDERS:
                text = re.sub(pattern, constant, text)
            found[entry["kind"], entry["template"]].add(text)
    return found


def best(texts: set[str], template: str) -> str:
    """Return the best example: one that has all values, none of them dull, and of those the shortest."""

    def faults(text: str) -> int:
        return (not messages.matches(text, template, ".+")) + (DULL.search(text) is not None)

    return min(texts, key=lambda text: (faults(text), len(text), text))


def make() -> None:
    """Write the examples, and print the messages that have none."""
    old = messages.examples() if messages.EXAMPLES.exists() else {}
    texts = recorded()
    made: dict[str, dict[str, str]] = {}
    for kind, templates in sorted(messages.templates().items()):
        for template in sorted(templates, key=str.casefold):
            example = old.get(kind, {}).get(template)
            if example is None and (kind, template) in texts:
                example = best(texts[kind, template], template)
            if example is None:
                print(f"no test has provoked {kind}: {template}")
            else:
                made.setdefault(kind, {})[template] = example
    messages.EXAMPLES.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    status = 0
    if tests := sys.argv[1:]:
        copy()
        status = run(tests)
    make()
    sys.exit(status)
