"""One exception for everything that a user can put right.

Whatever is raised as an ``OledError`` carries one message that names the thing, the value and the remedy. The command
lines print it as a single line and exit with code 2; library users catch it (it is a ``ValueError``). Anything else
that escapes is a defect of this package and keeps its traceback.
"""


class OledError(ValueError):
    """A user's mistake or a limit of the machine, told so that the user can act on it."""


class ConfigError(OledError):
    """A ``config.json``, preset or argument that does not describe a model this package implements."""


class CheckpointError(OledError):
    """A checkpoint folder that cannot be read as it is; the message lists every problem found, not the first."""


# A problem may quote what a file holds, and that may be a name of a million characters.
_LONGEST_PROBLEM = 2000


def problem_list(subject: str, problems: list[str], *, limit: int = 20) -> str:
    """Joins ``problems`` under ``subject`` into one line; all of them counted, the first ``limit`` spelled out.

    What cannot be printed is shown as an escape, and a problem of more than 2,000 characters is cut.
    """
    shown = "; ".join(_printable(problem) for problem in problems[:limit])
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f"{subject}: {count}: {shown}{more}"


def _printable(problem: str) -> str:
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in problem[:_LONGEST_PROBLEM])
    left = len(problem) - _LONGEST_PROBLEM
    return f"{text}... ({left} more characters)" if left > 0 else text
