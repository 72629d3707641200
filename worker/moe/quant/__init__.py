"""Quantisation methods: each owns its weights' format and builds its own kernel."""
