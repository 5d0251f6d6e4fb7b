"""RequestTexts of tokens, stop texts, limits, metrics: what needs no server."""

import pytest
import transformers
from helpers.models import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from nbdist.errors import UsageError
from nbdist.swarm import NoRoute
from nbdist.swarm.http.api_error import ApiError
from nbdist.swarm.http.limits import Limits
from nbdist.swarm.http.metrics import Metrics
from nbdist.swarm.http.request import TextRequest
from nbdist.swarm.http.stop_texts import StopTexts
from nbdist.swarm.http.text_answer import TextAnswer
from nbdist.swarm.http.token_texts import TokenTexts
from nbdist.swarm.http.writing import Piece, TokenScore


def with_byte_fallback():
    """A tokenizer like Llama 2's, to which each character but "a" and the space is one token for each of its bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a"]
    own = Tokenizer(models.BPE({each: number for number, each in enumerate(pieces)}, [], byte_fallback=True))
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    own.decoder = decoders.Sequence(steps)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, clean_up_tokenization_spaces=False)


tokenizer = tiny_tokenizer.make()
llamas = with_byte_fallback()


def passed_on(pieces, stops):
    found = StopTexts(stops)
    texts = []
    for piece in pieces:
        texts.append(found.add(piece))
        if found.found:
            return texts, True
    return [*texts, found.end()], False


@given(st.lists(st.text("abc", max_size=4)), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_a_text_is_cut_before_the_first_stop_text(pieces, stops):
    whole = "".join(pieces)
    texts, stopped = passed_on(pieces, stops)
    assert stopped == any(stop in whole for stop in stops)
    if not stopped:
        assert "".join(texts) == whole
        return
    # A stop text counts when it is complete: one that begins before it may be completed later.
    first = next(end for end in range(len(whole) + 1) if any(stop in whole[:end] for stop in stops))
    assert whole.startswith("".join(texts))
    assert not any(stop in "".join(texts) for stop in stops)
    assert len("".join(texts)) < first or not pieces


def test_a_stop_text_over_several_pieces_is_held_back():
    assert passed_on(["Hel", "lo E", "N", "D of it"], ["END"]) == (["Hel", "lo ", "", ""], True)
    assert passed_on(["Hel", "lo E", "N", "E"], ["END"]) == (["Hel", "lo ", "", "EN", "E"], False)
    assert passed_on(["lo E", "N"], ["END"]) == (["lo ", "", "EN"], False)


def run_of(tokenizer, text, prompt):
    """The tokens of a prompt, and those of the text that follows it."""
    before = tokenizer(prompt)["input_ids"]
    return before, tokenizer(prompt + text)["input_ids"][len(before) :]


@given(st.text("a 三😀\u1019", max_size=30), st.text("a三😀", min_size=1, max_size=5))
def test_texts_of_byte_tokens_are_the_text(text, prompt):
    """As those of Llama 2, whose decoder gives up a whole run of bytes that begins within a character."""
    before, tokens = run_of(llamas, text, prompt)
    found = TokenTexts(llamas.decode, before)
    assert [*(found.add(token) for token in tokens), found.end()] == [*pieces_of(tokens, text), ""]


def pieces_of(tokens, text):
    """Each character comes with its last token."""
    sizes = [1 if each in "a " else len(each.encode()) for each in text]
    assert sum(sizes) == len(tokens)
    return [piece for each, size in zip(text, sizes, strict=True) for piece in [*[""] * (size - 1), each]]


@pytest.mark.parametrize("after", ["", "a"])
def test_bytes_that_complete_nothing_leave_the_characters_before_them(after):
    before, tokens = run_of(llamas, "😀三" + after, "a")
    found = TokenTexts(llamas.decode, before)
    del tokens[6:7]  # the last byte of the second character
    assert "".join([*map(found.add, tokens), found.end()]).rstrip("a") == "😀" + "\N{REPLACEMENT CHARACTER}" * 2


@given(st.text(max_size=30), st.text(max_size=5))
def test_the_texts_of_tokens_are_the_text(text, prompt):
    tokens = tokenizer(text)["input_ids"]
    found = TokenTexts(lambda each: tokenizer.decode(each, skip_special_tokens=True), tokenizer(prompt)["input_ids"])
    pieces = [found.add(token) for token in tokens]
    if not text.endswith("\N{REPLACEMENT CHARACTER}"):
        assert "\N{REPLACEMENT CHARACTER}" in text or not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) + found.end() == text


def test_half_a_character_is_shown_at_the_end_only():
    found = TokenTexts(tokenizer.decode, [])
    first, second, _ = tokenizer("€")["input_ids"]
    assert [found.add(first), found.add(second)] == ["", ""]
    assert found.end() == "\N{REPLACEMENT CHARACTER}"
    assert found.end() == ""


def test_a_space_at_the_begin_depends_on_the_prompt():
    """As with SentencePiece, whose decoder drops a space at the begin."""
    decode = lambda tokens: " ".join(map(str, tokens))  # noqa: E731
    assert TokenTexts(decode, [7]).add(8) == " 8"
    assert TokenTexts(decode, []).add(8) == "8"


def test_the_more_probable_of_tokens_with_one_text_is_shown():
    request = TextRequest.read(b'{"model": "m", "prompt": "x", "logprobs": 3}', chat=False)
    score = TokenScore("?", -0.1, [("?", -0.1), ("?", -3.0), ("a", -4.0)], 0)
    found = TextAnswer(request, "1", 0, 1).whole([(0, Piece("?", score, "stop"))])
    assert found["choices"][0]["logprobs"]["top_logprobs"] == [{"?": -0.1, "a": -4.0}]


def test_turns_come_in_order():
    limits, log = Limits(2, 2, 600), []
    starts = [lambda number=number: log.append(number) for number in range(4)]
    limits.enter(starts[:3])
    assert (log, limits.running, limits.queued) == ([0, 1], 2, 1)
    limits.enter(starts[3:])
    with pytest.raises(ApiError, match="2 texts wait for their turn, and 2 may") as found:
        limits.enter([lambda: log.append(4)])
    assert (found.value.status, found.value.headers) == (429, {"Retry-After": "5"})
    limits.withdraw(starts[:3])
    assert (limits.running, limits.queued) == (2, 1)
    limits.leave()
    assert (log, limits.running, limits.queued) == ([0, 1, 3], 2, 0)


def test_a_request_for_more_texts_than_there_is_room_is_refused_whole():
    limits, log = Limits(1, 1, 600), []
    with pytest.raises(ApiError):
        limits.enter([lambda: log.append(0)] * 3)
    assert (log, limits.running, limits.queued) == ([], 0, 0)


def test_the_rate_is_limited():
    limits = Limits(1, 1, 60)
    for _ in range(60):
        limits.admit(100.0)
    with pytest.raises(ApiError, match="more than 60 requests a minute: try again in 1 s") as found:
        limits.admit(100.5)
    assert (found.value.status, found.value.headers) == (429, {"Retry-After": "1"})
    limits.admit(101.0)
    with pytest.raises(ApiError):
        limits.admit(101.5)


def test_metrics_have_prometheus_form():
    metrics = Metrics()
    metrics.requests['{path="other",status="200"}'] += 2
    metrics.count({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7})
    assert metrics.text(Limits(1, 1, 1), ["online", "online", "gone"]).splitlines() == [
        "# TYPE nbdist_requests_total counter",
        'nbdist_requests_total{path="other",status="200"} 2',
        "# TYPE nbdist_tokens_total counter",
        'nbdist_tokens_total{kind="prompt"} 3',
        'nbdist_tokens_total{kind="completion"} 4',
        "# TYPE nbdist_texts_running gauge",
        "nbdist_texts_running 0",
        "# TYPE nbdist_texts_queued gauge",
        "nbdist_texts_queued 0",
        "# TYPE nbdist_servers gauge",
        'nbdist_servers{state="online"} 2',
        'nbdist_servers{state="gone"} 1',
    ]


def test_errors_of_the_server_are_not_the_clients(caplog):
    error = ApiError.of(UsageError("the swarm is closed"))
    assert (error.status, error.body["error"]["type"], error.headers) == (503, "server_error", {})
    assert "the swarm is closed" in str(error)
    assert ApiError.of(NoRoute("no server is left")).headers == {"Retry-After": "5"}
    error = ApiError.of(ZeroDivisionError("a secret"))
    assert error.status == 500
    assert "secret" not in str(error)
    assert "a secret" in caplog.text
