"""What `d3serve demo` asks, and what is true: a package that the bundled checkpoint never met in training."""

from typing import Any, Final

# Debian 12's package openntpd, in its maintainers' words; the truths are its section and debtags.
REQUEST: Final[dict[str, Any]] = {
    "state": {
        "summary": "OpenBSD NTP daemon",
        "description": (
            "NTP, the Network Time Protocol, is used to keep the computer clocks synchronized. It provides the "
            "ability to sync the local clock to remote NTP servers and can act as NTP server itself, "
            "redistributing the local clock."
        ),
    },
    "questions": {
        "section": {
            "type": "choice",
            "instructions": "Which section does the package belong to?",
            "criteria": {
                "games": None,
                "network tools": None,
                "libraries": None,
                "science": None,
                "text editors": None,
                "fonts": None,
            },
        },
        "needs a network": {"type": "noul", "instructions": "Does the package need a network?"},
        "is a game": {"type": "noul", "instructions": "Is the package a game?"},
        "role": {
            "type": "choice",
            "instructions": "Which role does the package play?",
            "criteria": {"a program to run": None, "a shared library": None, "documentation": None},
        },
        "dependencies": {
            "type": "score",
            "instructions": "How many other packages does it need?",
            "criteria": ["none", "1 or 2", "3 to 6", "7 to 14", "15 or more"],
        },
    },
}
TRUTHS: Final[dict[str, str]] = {
    "section": "network tools",
    "needs a network": "yes",
    "is a game": "no",
    "role": "a program to run",
    "dependencies": "3 to 6",
}
