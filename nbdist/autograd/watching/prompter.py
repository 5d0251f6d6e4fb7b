"""`Prompter`: has observers send what they have kept back when nothing more happens, as in a pass that hangs."""

from __future__ import annotations

import logging
import threading
import time
import weakref

from nbdist.autograd.watching.observer import Observer

_EVERY = 0.1  # seconds

_log = logging.getLogger("nbdist.autograd")


class Prompter:
    """Prompts the observers of one worker as long as anybody holds them, in a thread that ends with the last one."""

    def __init__(self) -> None:
        self._observers = weakref.WeakSet[Observer]()
        self._lock = threading.Lock()
        self._runs = False

    def follow(self, observer: Observer) -> None:
        """Prompt this observer from now on."""
        with self._lock:
            self._observers.add(observer)
            if not self._runs:
                threading.Thread(target=self._run, name="nbdist-prompter", daemon=True).start()
                self._runs = True

    def _run(self) -> None:
        while True:
            time.sleep(_EVERY)
            with self._lock:
                observers = list(self._observers)
                if not observers:
                    self._runs = False
                    return
            for observer in observers:
                try:
                    observer.flush()
                except Exception:  # such as of a transport that is closed: the others must still be prompted
                    _log.debug("what an observer has kept back was not sent", exc_info=True)
            del observer, observers
