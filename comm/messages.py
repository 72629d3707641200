"""Messages that keep the group together, apart from requests and their tokens. No torch here.

Everything that travels over a ZeroMQ socket is a msgspec struct of a tagged union: decoding rejects unknown tags,
missing fields and wrong types, and nothing is ever unpickled.
"""

import msgspec


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Worker to worker: `slot` has left the park and waits in the header exchange of this step."""

    epoch: int
    step: int
    slot: int


class StopEngine(msgspec.Struct, frozen=True, tag="stop"):
    """From the worker's own actor, never from the network: leave the step loop.

    The step header carries the wish to the other ranks, and all leave at the same step.
    """


class Nudge(msgspec.Struct, frozen=True, tag="nudge"):
    """From the worker's own actor: leave the wait, a call for the engine's thread was queued."""
