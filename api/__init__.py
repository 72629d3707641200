"""HTTP: what clients see."""
