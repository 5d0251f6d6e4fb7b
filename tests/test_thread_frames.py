"""Looking at the threads' frames: also while Python's garbage collector has something to free."""

import subprocess
import sys
import threading

from nbdist.thread_frames import thread_frames


def test_each_thread_has_its_frame():
    waits = threading.Event()
    thread = threading.Thread(target=waits.wait)
    thread.start()
    frames = thread_frames()
    waits.set()
    assert frames[threading.get_ident()].f_code.co_name == "thread_frames"
    assert frames[thread.ident or 0].f_back is not None


LOOKS = """
import gc, threading, time
from nbdist.thread_frames import thread_frames

class Cycle:
    def __init__(self):
        self.own, self.me = threading.local(), self

def wait(event):
    event.wait()

for more in range(1, 40):  # in one of these rounds, the collection begins while frame objects are made
    event = threading.Event()
    threads = [threading.Thread(target=wait, args=(event,)) for _ in range(20)]
    for thread in threads:
        thread.start()
    time.sleep(0.01)
    gc.collect()
    gc.set_threshold(10000)
    Cycle()
    gc.set_threshold(gc.get_count()[0] + more)
    thread_frames()
    gc.set_threshold(10000)
    event.set()
print("done", gc.isenabled())
"""


def test_a_collection_does_not_hang_the_process():
    """Python's own function hangs here, in 3.11: it holds a lock that freeing a `threading.local` takes."""
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, timeout=120)
    assert done.stdout == "done True\n", done
