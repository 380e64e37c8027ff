# SPDX-License-Identifier: Apache-2.0
"""Lets the processes of one engine meet and share an arena.

Rank 0 leads. It listens on a Unix socket named after the engine's id. Every other rank sends the
size of its shard of a block. Rank 0 then creates the arena and sends its file descriptor to the
ranks and to one scheduler. The socket also proves ownership: a second engine with the same id finds
that it answers, and stops. A killed engine leaves a socket that does not answer; the next start
removes it.

An arena has one scheduler in its life. Only that process knows which block is in which slot, and
after its end workers may still make copies that it ordered. A restarted scheduler therefore needs
new workers, which create a new arena.

`meet` has the functions that processes call, `session_server` is rank 0's end, `runtime_directory`
has the sockets, and `wire` has the messages. `state_reports` reports health and shared stores to
operators.
"""

from flexkv.session.meet import MEET_SECONDS, Session, alone, attach, join, lead
from flexkv.session.wire import SessionInfo, Shard

__all__ = ["MEET_SECONDS", "Session", "SessionInfo", "Shard", "alone", "attach", "join", "lead"]
