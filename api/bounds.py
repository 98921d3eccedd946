"""What a request may ask for, where no operator has a reason to change it; the rest is in the settings."""

from typing import Final

from d3serve.store.files import MAX_FILE_BYTES

MAX_JSON_DEPTH: Final = (
    100  # deeper than any document that people write, shallower than what exhausts a stack
)
MAX_QUESTIONS: Final = (
    400  # of a job, as OpenAI's decisions may have; more fill several jobs, which share their state
)
MAX_QUESTION_ID_CHARS: Final = 256  # ids come back in every answer
MAX_WAIT_S: Final = 60.0  # of `?wait=` and `Prefer`; our clients ask for up to 30 s
SYNC_WAIT_S: Final = (
    9.0  # of a synchronous call that asks for nothing else; the stock SDK gives up after 10 s
)
MAX_UPLOAD_BYTES: Final = MAX_FILE_BYTES + 64 * 2**10  # a file, and the form around it
