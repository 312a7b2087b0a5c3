"""The one exception that reaches people: a mistake they can mend, said in one sentence or two, without a traceback."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Names the file or option at fault, what was expected and what to do. The command line prints it as it is."""

    exit_code = 2


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean X?' for the nearest known name, '' when none is near."""
    names = {candidate.lower(): candidate for candidate in known}
    near = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f" Did you mean {names[near[0]]}?" if near else ""
