"""One worker: the model, its experts and its requests."""
