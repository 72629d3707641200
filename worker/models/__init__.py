"""The native decoder and the families that configure it."""
