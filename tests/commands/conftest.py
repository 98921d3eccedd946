"""Fixtures of a served API, from tests/service.py."""

from service import service, serving, settings, take_turns, worker

__all__ = ["service", "serving", "settings", "take_turns", "worker"]
