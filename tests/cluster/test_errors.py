"""How a cell fails whose workers failed."""

from __future__ import annotations

import builtins

import pytest

import nbdist
from nbdist.cluster.errors import CellError, CellInterrupted, CellTimeout, WorkerError, make_error
from nbdist.errors import NbdistError, WorkerLost


def failed(rank, name="ValueError", text="bad", traceback=None):
    worker = f"worker{rank}"
    if traceback is None:
        traceback = (f"Cell In[3] on {worker}, line 1", f"{name}: {text}")
    return WorkerError(worker, name, text, tuple(traceback))


EXCEPTIONS = [
    each
    for each in vars(builtins).values()
    if isinstance(each, type) and issubclass(each, BaseException) and each is not BaseException
]
NOT_ITSELF = (StopIteration, StopAsyncIteration, SyntaxError, ExceptionGroup, BaseExceptionGroup)


# -- one error ----------------------------------------------------------------------------------


def test_one_workers_error_is_the_cells():
    error = make_error([failed(1)], 1)
    assert isinstance(error, CellError)
    assert isinstance(error, NbdistError)
    assert isinstance(error, ValueError)
    assert type(error).__name__ == "ValueError"
    assert str(error) == "bad"
    assert error.errors == (failed(1),)
    assert error._render_traceback_() == ["Cell In[3] on worker1, line 1", "ValueError: bad"]


def test_it_can_be_caught_as_its_own_class():
    with pytest.raises(ZeroDivisionError, match=r"^division by zero$"):
        raise make_error([failed(0, "ZeroDivisionError", "division by zero")], 1)


@pytest.mark.parametrize("kind", EXCEPTIONS, ids=lambda kind: kind.__name__)
def test_every_builtin_error_has_its_name_and_its_text(kind):
    error = make_error([failed(0, kind.__name__, "'the text'")], 1)
    assert (type(error).__name__, str(error), error.errors[0].text) == (kind.__name__, "'the text'", "'the text'")
    assert isinstance(error, CellError)
    assert isinstance(error, kind) == (issubclass(kind, Exception) and not issubclass(kind, NOT_ITSELF))


def test_errors_of_nbdist_can_be_caught_too():
    error = make_error([failed(0, "WorkerLost", "worker0 was killed by SIGKILL")], 2)
    assert isinstance(error, WorkerLost)
    assert isinstance(error, nbdist.WorkerLost)
    assert isinstance(make_error([failed(0, "RpcTimeout", "")], 1), TimeoutError)


def test_errors_of_others_have_their_name():
    error = make_error([failed(0, "OutOfMemoryError", "CUDA out of memory")], 1)
    assert type(error).__name__ == "OutOfMemoryError"
    assert type(error).__mro__[1] is CellError


def test_names_that_only_look_like_a_class_make_no_mischief():
    for name in ("print", "__name__", "annotations", "object", "", "a.b"):
        error = make_error([failed(0, name, "text")], 1)
        assert (type(error).__name__, type(error).__bases__) == (name, (CellError,))


def test_the_class_is_the_same_every_time():
    assert type(make_error([failed(0)], 1)) is type(make_error([failed(1)], 2))


def test_an_error_without_a_traceback_is_shown_by_its_text():
    assert make_error([failed(0, "Aborted", "gave up", ())], 1).traceback == ["Aborted: gave up"]
    assert make_error([failed(0, "KeyboardInterrupt", "", ())], 2).traceback == ["[worker0]", "KeyboardInterrupt"]


# -- several ------------------------------------------------------------------------------------


def test_one_of_several_workers_is_named():
    assert make_error([failed(1)], 2).traceback == ["[worker1]", "Cell In[3] on worker1, line 1", "ValueError: bad"]


def test_the_same_error_of_several_is_shown_once():
    error = make_error([failed(0), failed(1), failed(2)], 4)
    assert str(error) == "bad"
    assert error.traceback == ["[worker0-2]", "Cell In[3] on worker0-2, line 1", "ValueError: bad"]
    assert [each.worker for each in error.errors] == ["worker0", "worker1", "worker2"]


def test_a_name_that_begins_like_a_workers_is_another():
    lines = [(f"Cell In[3] on worker{rank}, line 1", "  called on worker10, on worker1x") for rank in (1, 2)]
    error = make_error([failed(rank, traceback=each) for rank, each in zip((1, 2), lines, strict=True)], 12)
    assert error.traceback == ["[worker1,2]", "Cell In[3] on worker1,2, line 1", "  called on worker10, on worker1x"]


def test_colours_make_no_difference_and_stay():
    coloured = [f"\x1b[32mIn[3] on worker{rank}\x1b[39m, line 1" for rank in range(2)]
    plain = WorkerError("worker2", "ValueError", "bad", ("In[3] on worker2, line 1",))
    error = make_error([*(failed(rank, traceback=[coloured[rank]]) for rank in range(2)), plain], 3)
    assert error.traceback == ["[worker0-2]", "\x1b[32mIn[3] on worker0-2\x1b[39m, line 1"]


def test_different_texts_of_one_kind_are_each_said():
    error = make_error([failed(rank, text=f"rank {rank % 2}") for rank in range(4)], 4)
    assert isinstance(error, ValueError)
    assert str(error) == "worker0,2: rank 0; worker1,3: rank 1"
    assert [line for line in error.traceback if line.startswith("[")] == ["[worker0,2]", "[worker1,3]"]


def test_the_same_text_at_different_places_is_said_once_and_shown_at_each():
    error = make_error([failed(rank, traceback=[f"line {rank}"]) for rank in range(2)], 2)
    assert str(error) == "bad"
    assert error.traceback == ["[worker0]", "line 0", "[worker1]", "line 1"]


def test_long_texts_that_differ_by_numbers_only_are_one():
    texts = [
        f"Connection closed by peer [127.0.0.1]:{port}, which is typically caused by a remote worker crashing: "
        f"<ProcessGroup object at 0x7f{port:x}>"
        for port in (12345, 54321)
    ]
    error = make_error([failed(rank, text=text, traceback=["in line 3", text]) for rank, text in enumerate(texts)], 2)
    assert str(error) == texts[0]
    assert error.traceback == ["[worker0,1]", "in line 3", texts[0]]


def test_errors_are_one_whose_notes_differ_by_numbers_only():
    notes = [
        f"torch's error was RuntimeError: [third_party/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
        f"[127.0.0.1]:{port}"
        for port in (12345, 54321)
    ]
    error = make_error([failed(rank, traceback=["in line 3", note]) for rank, note in enumerate(notes)], 2)
    assert error.traceback == ["[worker0,1]", "in line 3", notes[0]]


def test_different_kinds_are_a_cell_error():
    error = make_error([failed(0), failed(1, "KeyError", "'x'"), failed(2, "MemoryError", "")], 3)
    assert type(error) is CellError
    assert str(error) == "worker0: ValueError: bad; worker1: KeyError: 'x'; worker2: MemoryError"


def test_at_most_four_tracebacks_are_shown():
    error = make_error([failed(rank, text=f"rank {rank}") for rank in range(7)], 7)
    assert [line for line in error.traceback if line.startswith("[")] == [f"[worker{rank}]" for rank in range(4)]
    assert error.traceback[-1] == "... and other errors on worker4-6"
    assert str(error) == "; ".join(f"worker{rank}: rank {rank}" for rank in range(4)) + "; and others on worker4-6"
    assert len(error.errors) == 7


def test_it_is_the_same_every_time():
    errors = [failed(rank, text=f"rank {rank % 3}") for rank in range(6)]
    first, second = make_error(errors, 6), make_error(errors, 6)
    assert (str(first), first.traceback, type(first)) == (str(second), second.traceback, type(second))


# -- by themselves ------------------------------------------------------------------------------


def test_interrupts_and_timeouts_are_pythons():
    assert isinstance(CellInterrupted(), KeyboardInterrupt)
    assert not isinstance(CellInterrupted(), Exception)
    assert isinstance(CellTimeout("late"), TimeoutError)
    assert isinstance(CellTimeout("late"), CellError)
    assert str(CellTimeout("late")) == "late"
    assert str(CellError()) == ""


def test_what_is_shown_is_a_copy():
    for error in (CellError("x"), CellInterrupted("x")):
        error.traceback = ("a", "b")
        assert error._render_traceback_() == ["a", "b"]
