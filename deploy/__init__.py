"""The command line, and the ways to start a deployment."""
