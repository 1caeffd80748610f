"""One end of a connection between two processes. Messages come and go in threads: neither process ever waits for the other to read."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any


class Channel:
    """`on_message` is called with each message and `on_end` once, when the other process has gone; both in a thread of the channel's own.

    Two threads that nobody interrupts, so that a signal's exception, which may come anywhere, leaves no message half sent or half read.
    """

    def __init__(
        self, connection: Connection[Any, Any], on_message: Callable[[Any], None], on_end: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._on_message, self._on_end = on_message, on_end
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="batchgen-sending", daemon=True)
        self._reader = threading.Thread(target=self._read, name="batchgen-receiving", daemon=True)
        self._writer.start()
        self._reader.start()

    def send(self, message: Any) -> None:
        """As it is now; changes made to it later are not seen. Where the other process has gone nothing happens."""
        self._outgoing.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def flush(self, seconds: float) -> None:
        """No more will be sent: waits, but not for longer, until what was sent is on its way."""
        self._outgoing.put(None)
        self._writer.join(seconds)

    def _write(self) -> None:
        try:
            while (message := self._outgoing.get()) is not None:
                self._connection.send_bytes(message)
        except OSError:
            pass  # the other process has gone, which the reader notices

    def _read(self) -> None:
        try:
            while True:
                self._on_message(pickle.loads(self._connection.recv_bytes()))
        except (EOFError, OSError):
            self._on_end()
        finally:
            self._outgoing.put(None)
            self._writer.join()  # its number must not become another file's while something is written to it
            self._connection.close()
