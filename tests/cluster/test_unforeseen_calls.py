"""Calls that a cell does not make itself: a finaliser's and a signal handler's, in real kernels, while cells call."""

SETUP = """\
%%remote
import gc, signal, time
from nbdist.errors import UsageError

calls = []

def count(amount=1):
    calls.append(amount)
    return amount

class Leaves:
    def __init__(self):
        self.self = self
    def __del__(self):
        rpc.rpc_async('worker1', count)
"""

FINALISERS = """\
%%remote 0
before = gc.get_threshold()
gc.set_threshold(7, 1, 1)
for _ in range(300):
    Leaves()
    assert rpc.rpc_sync('worker1', abs, args=(-3,)) == 3
    assert rpc.remote('worker1', abs, args=(-3,)).to_here() == 3
gc.set_threshold(*before)
gc.collect()
"""

HANDLER = """\
%%remote 0
made = refused = 0
def handle(*_):
    global made, refused
    try:
        assert rpc.rpc_sync('worker1', count) == 1
        made += 1
    except UsageError:
        refused += 1

usual = signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.004, 0.004)
try:
    while made + refused < 150:
        assert rpc.rpc_sync('worker1', abs, args=(-3,)) == 3
finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, usual)
print(made + refused)
"""

COUNT = """\
%%remote 1
until = time.monotonic() + 20
while len(calls) < {expected} and time.monotonic() < until:
    time.sleep(0.05)
print(len(calls))
calls.clear()
"""


def test_finalisers_call_while_a_cell_calls(two):
    two.run(SETUP)
    assert two.run(FINALISERS).error is None
    assert two.run(COUNT.format(expected=300)).stdout == "300\n"


def test_a_signals_handler_calls_while_a_cell_calls(two):
    two.run(SETUP)
    ran = two.run(HANDLER)
    assert ran.error is None
    expected = int(ran.stdout.split()[-1])
    assert two.run(COUNT.format(expected=expected)).stdout == f"{expected}\n"
