"""Fixtures of a served API, from tests/service.py."""

from service import service, settings, take_turns, worker

__all__ = ["service", "settings", "take_turns", "worker"]
