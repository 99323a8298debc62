"""Connections that do not get on: closed after a while, and the oldest idle ones of a client make room."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

WAIT = 10.0  # seconds for a request to come in whole, headers and body
GRACE = 0.5  # seconds until it is known which clients have left
PER_CLIENT = 64  # connections of one address; a browser opens six


class PatientProtocol(H11Protocol):
    """HTTP with a limit on the time a request takes to arrive and on a client's connections."""

    wait, per_client, grace = WAIT, PER_CLIENT, GRACE

    def connection_made(self, transport: Any) -> None:
        """Watch the new connection, and close an idle one where the client has too many."""
        super().connection_made(transport)
        self.opened = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._watch()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        """Pass the bytes on; what they leave unfinished must be finished in time."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop watching."""
        self._stop()
        super().connection_lost(exc)

    @property
    def idle(self) -> bool:
        """Whether no answer is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """One timer from the first byte of a request, or the opening, to the end of its body."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.wait, self._give_up)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        self.transport.close()

    def _make_room(self) -> None:
        own = [p for p in self.connections if isinstance(p, PatientProtocol) and p._host == self._host]
        waiting = sorted((p for p in own if p.idle and p is not self), key=lambda p: p.opened)
        for protocol in waiting[: max(0, len(own) - self.per_client)]:
            protocol.transport.close()
        if len(own) - len(waiting) > self.per_client:  # all of them are being answered
            self.loop.call_later(self.grace, self._yield)

    def _yield(self) -> None:
        """Close this connection where too many are being answered still; clients that left are gone now."""
        own = [p for p in self.connections if isinstance(p, PatientProtocol) and p._host == self._host]
        if self in own and sum(not p.idle for p in own) > self.per_client:
            self.transport.close()

    @property
    def _host(self) -> str | None:
        return self.client[0] if self.client else None
