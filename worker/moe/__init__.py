"""Mixture-of-Experts layers: router, experts, and the runner that joins them over the dispatcher."""
