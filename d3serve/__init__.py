"""d3serve: typed questions about a state, answered by the Decision 3.0 models, each state read once."""

__version__ = "0.1.0"
