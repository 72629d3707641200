"""The demo model (`model/`, package data) and the programs that made it; only `train` is meant to be run."""
