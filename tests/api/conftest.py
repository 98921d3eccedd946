"""Fixtures of a served API, from tests/service.py."""

from service import app, client, counter, service, serving, settings, stats, take_turns, worker

__all__ = ["app", "client", "counter", "service", "serving", "settings", "stats", "take_turns", "worker"]
