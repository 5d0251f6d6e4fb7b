"""What it costs to have a language model in parts, and what a death costs: SmolLM2 over three workers.

The same weights, from the same file, alone and in a swarm, turn by turn. Needs the packages that
`nbdist.swarm.serve("smollm2")` names. ``--only speed`` (equal, speed, http, noticed, recovers, sweep,
chance) runs a part.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import contextlib
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

import harness
import torch
import transformers

import nbdist
from nbdist.swarm import adapter

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village,",
    "Water boils at",
    "def fibonacci(n):",
    "The three laws of robotics are",
    "My favourite colour is",
    "In 1969, the first human",
    "A haiku about rain:",
    "To bake bread you need",
    "The opposite of hot is",
    "Dear Sir or Madam,",
    "2 + 2 =",
    "The sun rises in the",
    "Photosynthesis is the process by which",
    "She opened the door and",
    "The largest planet of the solar system",
    "Bonjour, je m'appelle",
    "An apple a day",
    "import torch",
    "The meaning of life",
]
LIMITS = {
    "speed": ("≥ 0.92", "0.98"),
    "http": ("≤ 1.05", "1.02"),
    "noticed": ("≤ 100 ms", "30 ms"),
    "fast": ("≤ 300 ms", "120 ms"),
    "p=0.001": ("≥ 0.95", ""),
    "p=0.01": ("≥ 0.6", ""),
}
PARTS = ("equal", "speed", "http", "noticed", "recovers", "sweep", "chance")
_BACK = 1.0
"""Seconds after which a worker that was killed is back."""

# A client in a process of its own: the seconds of a token, from the first event of a stream to its last.
_CLIENT = """
import http.client, json, sys, time
port, key, prompt, tokens = sys.argv[1:]
asked = {"model": "smollm2", "prompt": prompt, "max_tokens": int(tokens), "temperature": 0, "stream": True,
         "stream_options": {"include_usage": True}}
for _ in sys.stdin:
    connection = http.client.HTTPConnection("127.0.0.1", int(port))
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(asked), headers)
    at, found = [], {}
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            told = json.loads(line[6:])
            if told["choices"]:
                at.append(time.perf_counter())
            found = told.get("usage") or found
    print(json.dumps((at[-1] - at[0]) / (found["completion_tokens"] - 1)), flush=True)
"""


class After(transformers.StoppingCriteria):  # type: ignore[misc]
    """Does something behind each token, and notes when that came."""

    def __init__(self, act: Callable[[int], None] = lambda token: None) -> None:
        self.act = act
        self.at: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.at.append(time.perf_counter())
        self.act(len(self.at))
        return torch.zeros(ids.shape[0], dtype=torch.bool)


class Bench:
    """A cluster of three, the model alone, and the model in a swarm."""

    def __init__(self, cluster: nbdist.Cluster) -> None:
        self.cluster = cluster
        with self.swarm("exact") as swarm:
            self.tokenizer = swarm.tokenizer()
            self.alone = adapter.build(swarm.checkpoint.config)
            swarm.checkpoint.fill(self.alone)
            self.alone.tie_weights()
        self.assistant = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=self.alone.config.vocab_size,
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=4,
            )
        ).eval()

    @contextlib.contextmanager
    def swarm(self, recover: str) -> Iterator[Any]:
        """All workers, alive, with a third of the model each."""
        if any(worker.lost for worker in self.cluster.workers):
            self.cluster.restart()
        swarm = nbdist.swarm.serve("smollm2", workers=[0, 1, 2], recover=recover, route_timeout=30.0)
        try:
            yield swarm
        finally:
            swarm.close()

    def inputs(self, *prompts: str) -> Any:
        """Some texts."""
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        return self.tokenizer(list(prompts), return_tensors="pt", padding=len(prompts) > 1)

    def write(self, model: Any, inputs: Any, tokens: int, **options: Any) -> torch.Tensor:
        """What a model writes."""
        torch.manual_seed(0)
        found: torch.Tensor = model.generate(
            **inputs, **{"do_sample": False, **options}, max_new_tokens=tokens, pad_token_id=0, eos_token_id=None
        )
        return found

    # -- what is measured ---------------------------------------------------------------------

    def equal(self) -> dict[str, Any]:
        """Logits of all prompts, and the ways of writing."""
        with self.swarm("exact") as swarm, torch.no_grad():
            remote = swarm.causal_lm()
            logits = [
                torch.equal(self.alone(**inputs).logits, remote(**inputs).logits)
                for inputs in map(self.inputs, PROMPTS)
            ]
            one, many = self.inputs(PROMPTS[0]), self.inputs(*PROMPTS[:3])
            ways: dict[str, tuple[Any, dict[str, Any]]] = {
                "greedy": (one, {}),
                "sampling": (one, {"do_sample": True, "top_k": 50}),
                "beams": (one, {"num_beams": 4}),
                "beams that sample": (one, {"num_beams": 2, "do_sample": True}),
                "padded batch": (many, {}),
                "several texts of one": (one, {"num_return_sequences": 3, "do_sample": True}),
                "prompt lookup": (one, {"prompt_lookup_num_tokens": 4}),
                "assisted": (one, {"assistant_model": self.assistant}),
            }
            texts = {
                name: all(
                    torch.equal(*pair)
                    for pair in [tuple(self.write(model, inputs, 24, **options) for model in (self.alone, remote))]
                )
                for name, (inputs, options) in ways.items()
            }
        return {"logits": logits, "texts": texts}

    def speed(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of a token: 64 at a time, in turns."""
        times: dict[str, list[float]] = {"alone": [], "swarm": []}
        inputs = self.inputs(PROMPTS[1])
        with self.swarm("exact") as swarm:
            models = {"alone": self.alone, "swarm": swarm.causal_lm()}
            for number in range(rounds + 1):
                for name, model in models.items():
                    after = After()
                    self.write(model, inputs, 65, stopping_criteria=[after])
                    if number:
                        times[name].append((after.at[-1] - after.at[0]) / 64)
        return times

    def http(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of a token: written by a call in this process, and streamed to another one, in turns."""
        times: dict[str, list[float]] = {"generate": [], "http": []}
        inputs = self.inputs(PROMPTS[1])
        with self.swarm("exact") as swarm, contextlib.closing(swarm.http(name="smollm2")) as endpoint:
            model = swarm.causal_lm()
            arguments = [str(urlsplit(endpoint.url).port), endpoint.key, PROMPTS[1], "65"]
            client = subprocess.Popen(
                [sys.executable, "-c", _CLIENT, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert client.stdin is not None
            assert client.stdout is not None
            with client:
                for number in range(rounds + 1):
                    after = After()
                    self.write(model, inputs, 65, stopping_criteria=[after])
                    client.stdin.write("\n")
                    client.stdin.flush()
                    streamed = json.loads(client.stdout.readline())
                    if number:
                        times["generate"].append((after.at[-1] - after.at[0]) / 64)
                        times["http"].append(streamed)
                client.stdin.close()
        return times

    def noticed(self, times: int) -> list[float]:
        """Seconds from SIGKILL, in the middle of a text, until the swarm knows."""
        found = []
        for number in range(times):
            with self.swarm("exact") as swarm:
                victim = f"worker{number % 3}"
                told: list[float] = []

                def listen(swarm: Any = swarm, victim: str = victim, told: list[float] = told) -> None:
                    if swarm.states[victim] == "gone" and not told:
                        told.append(time.perf_counter())

                def kill(token: int, swarm: Any = swarm, victim: str = victim, told: list[float] = told) -> None:
                    if token == 5:
                        swarm.listen(listen)
                        swarm.kill(victim)
                        found.append(time.perf_counter())

                remote = swarm.causal_lm()
                self.write(remote, self.inputs(PROMPTS[2]), 8, stopping_criteria=[After(kill)])
                found[-1] = told[0] - found[-1]
        return [max(0.0, each) for each in found]

    def recovers(self, times: int) -> dict[str, Any]:
        """Seconds of the token during which a worker dies: history below 64, nobody else has its blocks."""
        found: dict[str, Any] = {"fast": [], "exact": [], "others": [], "equal": []}
        inputs = self.inputs(PROMPTS[1])
        expected = self.write(self.alone, inputs, 56)
        for number in range(times):
            for recover in ("fast", "exact"):
                with self.swarm(recover) as swarm:
                    remote = swarm.causal_lm()
                    victim = f"worker{number % 3}"
                    after = After(lambda token, s=swarm, v=victim: s.kill(v) if token == 48 else None)
                    text = self.write(remote, inputs, 56, stopping_criteria=[after])
                    steps = [later - earlier for earlier, later in zip(after.at, after.at[1:], strict=False)]
                    found[recover].append(steps[47])
                    found["others"] += steps[10:46]
                    found["equal"].append(torch.equal(text, expected))
        return found

    def sweep(self, positions: int) -> dict[str, int]:
        """Deaths at positions of a text, of each worker, in three ways of writing; and deep prompts."""
        right = count = banned = 0
        chosen = random.Random(0)
        prompts = 0.1 * torch.randn(30, 1, 2, 576, generator=torch.Generator().manual_seed(0))
        ways: list[tuple[dict[str, Any], bool]] = [({}, False), ({"num_beams": 3}, False), ({}, True)]
        for options, deep in ways:
            inputs = self.inputs(PROMPTS[3])
            with self.swarm("exact") as swarm:
                remote = swarm.causal_lm()
                if deep:
                    remote.deep_prompts = prompts
                expected = self.write(remote, inputs, 24, **options)
            for token in chosen.sample(range(1, 24), positions):
                for victim in ("worker0", "worker1", "worker2"):
                    with self.swarm("exact") as swarm:
                        remote = swarm.causal_lm()
                        if deep:
                            remote.deep_prompts = prompts
                        after = After(lambda at, s=swarm, v=victim, t=token: s.kill(v) if at == t else None)
                        text = self.write(remote, inputs, 24, stopping_criteria=[after], **options)
                        states = dict(swarm.states)
                    count += 1
                    right += torch.equal(text, expected)
                    banned += any(state != "online" for name, state in states.items() if name != victim)
        return {"count": count, "right": right, "banned": banned}

    def chance(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of 128 tokens where each worker is killed with a chance at each token, and back a second later."""
        found: dict[str, list[float]] = {}
        plans = [("p=0", 0.0, False, 1), ("p=0.001", 0.001, False, 4), ("p=0.01", 0.01, False, 2)]
        plans += [("p=0.001, from scratch", 0.001, True, 4), ("p=0.01, from scratch", 0.01, True, 1)]
        inputs = self.inputs(PROMPTS[1])
        for number in range(rounds):
            for name, p, scratch, times in plans:
                for each in range(times):
                    seconds = self._with_deaths(inputs, p, scratch=scratch, seed=1000 * number + each)
                    found.setdefault(name, []).append(seconds)
                    print(f"{name}: {seconds:.1f} s", file=sys.stderr)
        return found

    def _with_deaths(self, inputs: Any, p: float, *, scratch: bool, seed: int) -> float:
        chance = random.Random(seed)
        threads: list[threading.Thread] = []
        with self.swarm("fast") as swarm:
            spans = {name: (blocks[0], blocks[-1] + 1) for name, blocks in swarm.blocks.items()}
            remote = swarm.causal_lm()
            self.write(remote, inputs, 4)
            began = time.perf_counter()

            def back(name: str) -> None:
                time.sleep(_BACK)
                self.cluster.restart(name.removeprefix("worker"))
                swarm.join(name, *spans[name])

            def risk(token: int) -> None:
                dead = False
                for name in spans:
                    if chance.random() < p and swarm.states[name] == "online":
                        swarm.kill(name)
                        threads.append(threading.Thread(target=back, args=(name,)))
                        threads[-1].start()
                        dead = True
                if dead and scratch:
                    raise _Died

            while True:
                try:
                    self.write(remote, inputs, 128, stopping_criteria=[After(risk)])
                    break
                except _Died:
                    continue
            seconds = time.perf_counter() - began
            for thread in threads:
                thread.join()
        return seconds


class _Died(Exception):
    """A worker died, and what was written is lost."""


def tables(numbers: dict[str, Any]) -> str:
    """As Markdown."""
    lines = ["| | measured | limit | aim |", "| --- | ---: | ---: | ---: |"]

    def row(told: str, measured: str, limit: str = "", aim: str = "") -> None:
        lines.append(f"| {told} | {measured} | {limit} | {aim} |")

    if "equal" in numbers:
        logits, texts = numbers["equal"]["logits"], numbers["equal"]["texts"]
        row("prompts whose logits are those of one process, to the last bit", f"{sum(logits)} of {len(logits)}", "all")
        row(
            f"ways of writing that give its tokens: {', '.join(texts)}", f"{sum(texts.values())} of {len(texts)}", "all"
        )
    if "speed" in numbers:
        alone, swarm = (statistics.median(numbers["speed"][name]) for name in ("alone", "swarm"))
        told = f"speed of writing against one process ({harness.duration(alone)} a token)"
        row(told, f"{alone / swarm:.3f}", *LIMITS["speed"])
    if "http" in numbers:
        called, streamed = (statistics.median(numbers["http"][name]) for name in ("generate", "http"))
        told = f"a token over HTTP, beside `generate` in the client's process ({harness.duration(called)})"
        row(told, f"{streamed / called:.3f}", *LIMITS["http"])
    if "noticed" in numbers:
        row(
            "from SIGKILL to its being known",
            harness.duration(statistics.median(numbers["noticed"])),
            *LIMITS["noticed"],
        )
    if "recovers" in numbers:
        found = numbers["recovers"]
        others = harness.duration(statistics.median(found["others"]))
        for name in ("fast", "exact"):
            told = f"the token that recovers, history 55, nobody else has the blocks, {name} (others take {others})"
            row(told, harness.duration(statistics.median(found[name])), *LIMITS.get(name, ("", "")))
        row(
            "of these, texts that are those of an undisturbed run",
            f"{sum(found['equal'])} of {len(found['equal'])}",
            "all",
        )
    if "sweep" in numbers:
        found = numbers["sweep"]
        told = "deaths at chosen positions, of each worker, greedy, beams and deep prompts: texts that are right"
        row(told, f"{found['right']} of {found['count']}", "all")
        row("of these, runs in which a healthy worker was left alone", f"{found['banned']}", "0")
    if "chance" in numbers:
        found = numbers["chance"]
        base = statistics.mean(found["p=0"])
        for name, times in found.items():
            if name != "p=0":
                chance = name.replace("p=", "p = ")
                told = f"128 tokens, each worker killed with {chance} at each, back after 1 s: speed against p = 0"
                row(told, f"{base / statistics.mean(times):.2f}", *LIMITS.get(name, ("", "")))
    return "\n".join(lines)


def main() -> None:
    """Measure, and print a table."""
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--only", choices=PARTS, help="only a part")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    harness.touch_memory()
    numbers: dict[str, Any] = {}
    with nbdist.Cluster(3, backend="none", preload=["nbdist.swarm"]) as cluster:
        bench = Bench(cluster)
        parts: dict[str, Callable[[], Any]] = {
            "equal": bench.equal,
            "speed": lambda: bench.speed(2 * options.rounds),
            "http": lambda: bench.http(2 * options.rounds),
            "noticed": lambda: bench.noticed(2 * options.rounds),
            "recovers": lambda: bench.recovers(options.rounds),
            "sweep": lambda: bench.sweep(2),
            "chance": lambda: bench.chance(max(1, options.rounds // 2)),
        }
        for name, part in parts.items():
            if options.only in (None, name):
                numbers[name] = part()
                print(f"{name}: done", file=sys.stderr)
    print(tables(numbers))
    harness.write(numbers, options.json)


if __name__ == "__main__":
    main()
