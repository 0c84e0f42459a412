"""How ``oled-jax`` and ``oled-convert`` run a command, and how they end.

Promises: a user's mistake, what the system refuses (a full disk, say) and an output that cannot be written are one line
``PROG: error: ...`` on standard error and exit code 2; an interrupt is one line and exit code 130, soon, however often
it is repeated; SIGTERM likewise, with 143; a reader that closes the pipe ends the command quietly with 141; characters
that standard output cannot show are replaced. Results go to standard output, everything said about them to standard
error. A traceback means a defect of this package.

Called without ``argv``, ``run_command`` owns the process: it changes how SIGINT and SIGTERM are handled, and after one
of them the process ends inside it. Called with one, as from a test, it leaves signals and streams alone and only
returns.

Deliberately not here: what the commands do, and imports that take time.
"""

import argparse
import contextlib
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from oled_jax.errors import OledError
from oled_jax.version import __version__

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT  # what a shell reports for a command that the signal ended; as for SIGTERM
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE

_SECONDS_TO_NOTICE = 1.0  # for the main thread to come out of a call into native code
_SECONDS_TO_CLEAN_UP = 5.0


class Parser(argparse.ArgumentParser):
    """Raises instead of printing its usage, so that a mistake is one line; option names are not guessed."""

    def __init__(self, **options: Any):
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise OledError(f"{message} (see {self.prog} --help)")


def command_parser(prog: str, description: str) -> tuple[Parser, Any]:
    """The parser of a command line with subcommands, and what each of them adds its own parser to.

    A subcommand sets the default ``run``, a function from the parsed namespace to the exit code.
    """
    parser = Parser(prog=prog, description=description)
    parser.add_argument("--version", action="version", version=f"{prog} {__version__}")
    return parser, parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")


def argument_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse`` as the ``type`` of an option: its OledError becomes the parser's message, with the option's name."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except OledError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def run_command(
    prog: str,
    build_parser: Callable[[], Parser],
    argv: Sequence[str] | None = None,
    *,
    left_behind: Callable[[argparse.Namespace], str] = lambda arguments: "",
) -> int:
    """Parses ``argv`` (default: the process's arguments), runs the subcommand and returns the exit code.

    ``build_parser`` is called under the same protection as the command, since it imports. ``left_behind`` is asked,
    from whatever thread, what an interrupted command has left; its answer ends the line that tells of the interrupt,
    and the namespace may lack everything that was not parsed yet. Without a subcommand the commands are listed on
    standard error. A command whose cleaning up may take more than a few seconds sets ``seconds_to_clean_up`` in the
    namespace. ``--help`` and ``--version`` leave through SystemExit, as argparse does.
    """
    arguments = argparse.Namespace()

    def ended_by(signum: int) -> str:
        # A terminal's cursor may stand inside a line that was being redrawn.
        start = "\n" if any(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr)) else ""
        what = "terminated" if signum == signal.SIGTERM else "interrupted"
        return f"{start}{prog}: {what}{left_behind(arguments)}\n"

    if argv is None:
        _secure_streams()
    else:
        try:
            return _parse_and_run(build_parser, argv, arguments)
        except KeyboardInterrupt:
            sys.stderr.write(ended_by(signal.SIGINT))
            return EXIT_INTERRUPTED
        except (OledError, OSError) as error:
            return _report(prog, error)
    interrupts = _Interrupts(ended_by, lambda: vars(arguments).get("seconds_to_clean_up", _SECONDS_TO_CLEAN_UP))
    try:
        try:
            interrupts.start()
            code = _parse_and_run(build_parser, None, arguments)
            interrupts.stop()
        except BaseException as error:
            interrupts.stop()
            if interrupts.received:  # whatever native code made of it
                interrupts.end()
            if not isinstance(error, OledError | OSError):
                raise
            code = _report(prog, error)
    except KeyboardInterrupt:
        interrupts.end()
    if interrupts.received:
        interrupts.end()
    return code


def _parse_and_run(
    build_parser: Callable[[], Parser], argv: Sequence[str] | None, arguments: argparse.Namespace
) -> int:
    if sys.stdout is None:
        raise OledError("standard output is closed: send it somewhere, such as >/dev/null")
    try:
        parser = build_parser()
        parser.parse_args(argv, arguments)
        if arguments.command is None:
            parser.print_help(sys.stderr)
            return EXIT_MISTAKE
        return arguments.run(arguments)
    finally:
        sys.stdout.flush()  # what cannot be written shows here and not when the interpreter ends


def _report(prog: str, error: Exception) -> int:
    """Tells of ``error`` in one line; returns the exit code."""
    if isinstance(error, BrokenPipeError | OutputError):
        # The interpreter flushes standard output once more when it ends, which must not fail again.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError) or isinstance(error.__cause__, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    with contextlib.suppress(OSError):  # there is nowhere left to tell that standard error is full
        print(f"{prog}: error: {' '.join(text.split())}", file=sys.stderr, flush=True)
    return EXIT_MISTAKE


class OutputError(OledError):
    """Standard output cannot be written, for the reason that is this error's cause.

    No OSError, since argparse drops those when it prints its help.
    """


class _StandardOutput(io.TextIOWrapper):
    """Standard output that names itself in its errors and replaces what its encoding cannot express."""

    def __init__(self, stream: io.TextIOWrapper):
        options = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        encoding = stream.encoding
        super().__init__(stream.detach(), encoding, errors="replace", newline="\n", **options)

    def write(self, text: str) -> int:
        with self._named():
            return super().write(text)

    def flush(self) -> None:
        with self._named():
            super().flush()

    @contextlib.contextmanager
    def _named(self):
        try:
            yield
        except OSError as error:
            raise OutputError(f"standard output cannot be written: {error.strerror or error}") from error


def _secure_streams() -> None:
    """Gives the process standard streams that output can be sent to without a second thought.

    A closed descriptor would be given to the next file that is opened, a checkpoint's shard for instance, and what
    native code prints would land in it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest one that is free, so this one
    if sys.stderr is None:  # print(file=None) would print to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (as long as the process)
    if sys.stdout is not None:
        sys.stdout = _StandardOutput(sys.stdout)


class _Interrupts:
    """SIGINT and SIGTERM in a process that runs one command: KeyboardInterrupt once, and a thread that sees to the end.

    One that is ignored from the start stays so, as SIGINT is in the background.

    During an import the process ends at once instead: the initialisation of native modules (jaxlib's, numpy's) answers
    an exception with a traceback or an abort.

    The thread is needed since an exception alone does not end every command: it is not raised before native code
    returns; raised in a callback, such as the one that jax hangs into the garbage collector, it is printed and lost;
    and what catches it may take long. The thread ends the process at another SIGINT, or when cleaning up takes more
    than ``patience()`` seconds; what is on disk then is what a killed process leaves, under temporary names. Another
    SIGTERM does not hurry it: ``timeout`` sends two at once, and who is out of patience sends SIGKILL.
    """

    def __init__(self, message: Callable[[int], str], patience: Callable[[], float]):
        self.received = 0  # the signal that came first
        self._taken = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) != signal.SIG_IGN]
        self._patience = patience
        self._message = message
        self._raised = False
        self._ending = threading.Lock()
        self._other_hook = sys.unraisablehook

    def start(self) -> None:
        """Takes the signals over, from the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        threading.Thread(target=self._watch, args=(reader,), name="oled-interrupts", daemon=True).start()
        sys.unraisablehook = self._unraisable
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for each in self._taken:
            signal.signal(each, self._raise)

    def stop(self) -> None:
        """No KeyboardInterrupt from here on: the command is over, and a signal ends the process in silence.

        After an interrupt it does nothing more, and ``end`` follows.
        """
        for each in self._taken:
            signal.signal(each, signal.SIG_IGN if self.received else signal.SIG_DFL)

    def end(self) -> NoReturn:
        """Says that the command was interrupted or terminated, and ends the process.

        Not by way of the interpreter's own end: XLA's threads go on compiling after an interrupted call, and when the
        interpreter takes down what they use, the process crashes. The command has cleaned up, and its output is
        flushed, unless it was given up; a flush here could wait for a lock for ever.
        """
        signum = self.received or signal.SIGINT
        self._ending.acquire()  # for good: whoever comes second waits for the end
        with contextlib.suppress(OSError):
            os.write(2, self._message(signum).encode(errors="backslashreplace"))
        os._exit(128 + signum)

    def _raise(self, signum: int, frame: FrameType | None) -> None:
        self.received = self.received or signum
        if self._raised:
            return
        self._raised = True
        if _importing(frame):
            self.end()
        raise KeyboardInterrupt

    def _unraisable(self, unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._raised = False  # it is lost, and the thread will have it raised again
        else:
            self._other_hook(unraisable)

    def _watch(self, reader: int) -> None:
        def again(seconds: float) -> bool:
            end = time.monotonic() + seconds
            while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
                if os.read(reader, 1)[0] == signal.SIGINT:
                    return True
            return False

        while (first := os.read(reader, 1)[0]) not in self._taken:
            pass
        self.received = self.received or first
        for _ in range(2):
            if again(_SECONDS_TO_NOTICE):
                break
            if self._raised:
                again(self._patience())
                break
            signal.raise_signal(first)
            os.read(reader, 1)  # that one
        self.end()


def _importing(frame: FrameType | None) -> bool:
    """Whether ``frame`` or one of its callers runs Python's import machinery."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
