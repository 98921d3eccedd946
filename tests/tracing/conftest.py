"""Fixtures of a traced service, from tests/traced.py."""

from traced import collector, service

__all__ = ["collector", "service"]
