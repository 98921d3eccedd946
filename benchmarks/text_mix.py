"""The text mix of the published comparison: 23 requests, 212 questions.

Six short states with 1, 4 and 16 questions each, a JSON state with 16, one request of 64 questions, a 40-option and
a 255-option choice, and an empty state with 4. Every round gives the states a new number, so that no
request meets a state that an earlier one left in the cache.
"""

from typing import Any

TICKETS = (
    "I was charged twice for order {n} last week and nobody answers my e-mails. I want the second payment "
    "back today, or I will go to my bank and dispute both. This is the third time that I write to you.",
    "Hello, order {n} has not arrived. The tracking page has said 'in transit' for nine days. I need the "
    "parcel before Friday because it is a birthday present. Can you tell me where it is or send another?",
    "After the update {n} the app closes as soon as I open the camera. I have restarted the phone, removed "
    "the app and installed it again. It worked for a year. Phone: a two-year-old one, newest system.",
    "Please change the address of customer {n} to 14 Harbour Lane. The invoice of this month should still go "
    "to the old address, all later ones to the new one. Thank you for your quick help last time!",
    "Our team of {n} would like to move from the monthly plan to a yearly one. What discount do you give, can "
    "we pay by bank transfer, and can seats be added later at the same price?",
    "Someone logged into account {n} from a country where I have never been. I changed the password, but I "
    "see two orders that are not mine. Block the account and cancel them at once, please.",
)
ASPECTS = (
    "ask for money back", "report a technical fault", "mention a deadline", "threaten to leave", "sound angry",
    "ask about prices", "concern a delivery", "report a crime", "need an answer today", "thank the team",
    "contain personal data", "concern an invoice", "ask for a change of data", "mention an earlier contact",
    "need a specialist", "concern several orders",
)  # fmt: skip
TEAMS = {
    "billing": "charges, refunds and invoices",
    "shipping": "parcels that are late, lost or broken",
    "technical": "faults of the app or the site",
    "accounts": "logins, addresses and fraud",
}
LEVELS = ["can wait a week", "this week", "tomorrow", "within the hour"]


def question(index: int) -> dict[str, Any]:
    """The questions in turn: mostly yes/no, every fourth a choice, every eighth a score."""
    if index % 8 == 5:
        return {"type": "score", "instructions": "How urgent is the message?", "criteria": LEVELS}
    if index % 4 == 1:
        return {"type": "choice", "instructions": "Which team should handle it?", "criteria": TEAMS}
    return {"type": "noul", "instructions": f"Does the message {ASPECTS[index % len(ASPECTS)]}?"}


def questions(count: int) -> dict[str, Any]:
    """`count` questions by name."""
    return {f"q{index}": question(index) for index in range(count)}


def options(count: int) -> dict[str, Any]:
    """One choice of many options."""
    criteria = {f"category {index}": f"everything of kind {index}" for index in range(count)}
    return {"kind": {"type": "choice", "instructions": "What is it about?", "criteria": criteria}}


def text_mix(number: int) -> list[dict[str, Any]]:
    """The 23 requests of round `number`."""
    states = [ticket.format(n=1000 * number + index) for index, ticket in enumerate(TICKETS)]
    requests = [{"state": f"{s} ({c})", "questions": questions(c)} for s in states for c in (1, 4, 16)]
    as_json = {
        "ticket": number,
        "text": states[0],
        "tags": ["payment", None],
        "customer": {"since": 2019, "vip": False},
    }
    return [
        *requests,
        {"state": as_json, "questions": questions(16)},
        {"state": f"{states[1]} (64)", "questions": questions(64)},
        {"state": f"{states[2]} (40)", "questions": options(40)},
        {"state": f"{states[3]} (255)", "questions": options(255)},
        {"state": "", "questions": questions(4)},
    ]
