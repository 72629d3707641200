"""Environment of tests that build groups."""

import os

# torch asks the name server for the names of addresses; a lost answer would cost 5 s a try.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
