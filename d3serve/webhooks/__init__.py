"""Webhooks: what an owner's receivers are told, where they may be, and the process that tells them."""
