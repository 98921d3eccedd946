"""How many files and connections this process may have open."""

import contextlib
import resource
from typing import Final

# More than we use; a hard limit of 2^30, as in some containers, would make others close as many one by one.
ENOUGH: Final = 65_536


def raise_descriptor_limit() -> None:
    """Raise the soft limit to the hard one: 1,024, or 256 on macOS, is for programs that still call select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
