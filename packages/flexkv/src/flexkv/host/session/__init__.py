# SPDX-License-Identifier: Apache-2.0
"""How the processes of one engine meet and share an arena.

Rank 0 leads: it listens on a unix socket that bears the engine's id, hears from every other rank
how large its shard of a block is, creates the arena and hands it out as a file descriptor, to the
ranks and to one scheduler. The socket is also the proof of ownership: a second engine of the same
id finds it answering and stops. A socket that nobody answers was left by a killed engine, and the
next start removes it.

An arena has one scheduler in its life. What is in the slots is known to that process alone, and
while it lives or dies the workers may still copy as it ordered: a scheduler that starts again needs
new workers, which make a new arena.

`meet` is what processes call; `server` is rank 0's end; `directory` holds the sockets; `wire` has
the messages. `store_states` has what engines report of their shared stores.
"""

from flexkv.host.session.meet import MEET_SECONDS, Session, alone, attach, join, lead
from flexkv.host.session.wire import SessionInfo, Shard

__all__ = ["MEET_SECONDS", "Session", "SessionInfo", "Shard", "alone", "attach", "join", "lead"]
