"""Ways of routing that are no top-k of scores, for `CustomRouter`.

Legend: T tokens, E experts, K experts per token.
"""

from moeray.worker.moe.router import RoutingFunction

ROUTING_FUNCTIONS: dict[str, RoutingFunction] = {}


def routing_function(name: str) -> RoutingFunction:
    """The function of this name; `ValueError` naming those there are."""
    if name not in ROUTING_FUNCTIONS:
        raise ValueError(f"routing is {name!r}, must be one of {', '.join(ROUTING_FUNCTIONS)}")
    return ROUTING_FUNCTIONS[name]
