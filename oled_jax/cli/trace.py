"""``oled-jax trace``: what prompts ask of the experts, forward by forward, recorded in a trace file.

Promises: everything that can be told without the weights, the place of the file and the room for it among that, is
checked before they are read; the file has its name only once it is whole. An interrupt, or an error on the way, leaves
nothing, or with ``--keep-partial`` the prompts that were finished. Memory is bounded, since rows wait on the disk.

The file takes up to twice its size while it is written: rows wait beside it in a nameless file.
"""

import argparse
import contextlib
import dataclasses
import gzip
import json
import os
import platform
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oled_jax.cli.loading import load_engine
from oled_jax.cli.options import add_decoding_options, add_model_options, add_placement_options, add_prompt_options
from oled_jax.cli.prepare import Prepared, check_model_folder, prepare
from oled_jax.cli.requests import Request, read_requests
from oled_jax.display import CompileLine
from oled_jax.errors import OledError
from oled_jax.files import open_regular, temporary_name
from oled_jax.progress import counted, format_bytes
from oled_jax.version import __version__

if TYPE_CHECKING:
    from oled_jax.decoding.loop import Generation
    from oled_jax.engine import Engine
    from oled_jax.lab.recording import TraceWriter

SUFFIXES = (".safetensors", ".safetensors.gz")
_MOST_BATCH = 1 << 10
_MOST_HEADER = 100_000_000  # bytes, the format's own limit
_SECONDS_TO_KEEP = 3600.0  # what was finished; a second interrupt ends it
_TERMINAL_SECONDS, _LOG_SECONDS = 0.2, 10.0


def add_parser(subparsers: Any) -> None:
    """Adds ``trace`` to the command line."""
    parser = subparsers.add_parser(
        "trace",
        help="record what prompts ask of the experts",
        description="Answers prompts and records the routing of every forward in a trace file, for `oled-jax replay`.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    add_prompt_options(parser, required=True)
    output = parser.add_argument_group("trace")
    output.add_argument("--out", required=True, metavar="FILE", help="file to write: .safetensors or .safetensors.gz")
    output.add_argument("--force", action="store_true", help="replace FILE if it exists and is a trace")
    output.add_argument(
        "--batch-size",
        type=int,
        default=1,
        metavar="N",
        help="prompts decoded together, in the order of the file; a change of split begins a new batch (default: 1)",
    )
    output.add_argument(
        "--weights",
        choices=("float16", "uint8"),
        default="float16",
        help="how router weights are stored: as policies see them (default), or rounded to 1/255, half as large",
    )
    output.add_argument(
        "--store-prompts",
        action="store_true",
        help="store the prompts' text too (their token ids are in the rows in any case)",
    )
    output.add_argument(
        "--keep-partial",
        action="store_true",
        help="write what was finished when interrupted or stopped by an error (default: nothing is written then)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    add_model_options(parser)
    add_placement_options(parser)
    add_decoding_options(parser)


def run(args: argparse.Namespace) -> int:
    """Carries out ``oled-jax trace``; returns the exit code."""
    from oled_jax.lab.recording import TraceWriter

    config = check_model_folder(args)
    out = _checked_out(args)
    if not 1 <= args.batch_size <= _MOST_BATCH:
        raise OledError(f"--batch-size is {args.batch_size}: give 1 to {_MOST_BATCH}")
    requests = read_requests(args)
    ready = prepare(args, config, requests)
    with _writing(out):
        writer = TraceWriter(config.num_experts, weights=args.weights, folder=out.parent)
        _check_room(out, ready, args)
    compiling = CompileLine()
    engine = load_engine(args, ready.context_length, compiling)
    writer.metadata |= about_run(args, ready, engine)
    if args.keep_partial:
        args.seconds_to_clean_up = _SECONDS_TO_KEEP
    totals = _Totals()
    try:
        _record(args, ready, engine, writer, totals, compiling, out)
    except BaseException:
        if not args.keep_partial or not totals.sequences:
            raise
        with _writing(out):
            writer.write(out)
        kept = f"{totals.sequences} of {counted(len(requests), 'prompt')}"
        print(f"{out}: kept {kept}, those that were finished", file=sys.stderr, flush=True)
        raise
    finally:
        compiling.clear()
    writer.metadata["complete"] = True
    with _writing(out):
        writer.write(out)
    result = totals.to_json(writer, engine, out)
    print(json.dumps(result) if args.json else summary(result), flush=True)
    return 0


def summary(result: dict[str, Any]) -> str:
    """One line about a finished trace, from the object of ``--json``."""
    parts = [
        counted(result["sequences"], "prompt"),
        f"{counted(result['rows'], 'row')} of {counted(result['tokens_per_row'], 'token')}",
        f"{counted(result['decode_forwards'], 'decoding forward')} and {result['prefill_forwards']:,} of prefill",
        f"W {result['working_set']:.1f} of {result['num_experts']}",
        f"{result['tokens_per_forward']:.3g} tokens/forward",
        format_bytes(result["bytes"]),
    ]
    if result["routing"] == "scripted":
        parts.append("routing scripted: taken from a trace, and the answers mean nothing")
    return f"{result['out']}: {', '.join(parts)}"


def about_run(args: argparse.Namespace, ready: Prepared, engine: "Engine") -> dict[str, Any]:
    """What a trace's metadata say of a whole run; no path, and nothing that differs from run to run."""
    import jax
    import jaxlib
    import numpy as np

    placed = engine.experts.metrics()
    about = {
        "model": Path(args.model).resolve().name,
        "config": ready.config.to_hf(),
        "dtype": str(np.dtype(engine.programs.dtype)),
        "decoding": {
            "rule": type(ready.rule).__name__.lower(),
            **dataclasses.asdict(ready.rule),
            "batch_size": args.batch_size,
        },
        "placement": {name: getattr(placed, name) for name in ("experts_on_device", "policy", "form")},
        "routing": placed.routing,
        "device": jax.devices()[0].device_kind,
        "versions": {
            "oled_jax": __version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "complete": False,  # until it is
    }
    return about | ({} if args.routing is None else {"routing_trace": Path(args.routing).name})


def batches(requests: list[Request], size: int) -> list[range]:
    """Places of the requests that are decoded together: neighbours, at most ``size``, all of one split.

    A split can then be selected from the trace without tearing a batch apart.
    """
    found, start = [], 0
    for place in range(1, len(requests) + 1):
        if place == len(requests) or place - start == size or requests[place].split != requests[start].split:
            found.append(range(start, place))
            start = place
    return found


@dataclasses.dataclass
class _Totals:
    """Sums over the batches that are finished."""

    sequences: int = 0
    generated_tokens: int = 0
    num_forwards: int = 0
    decode_forwards: int = 0
    prefill_forwards: int = 0
    requests: int = 0
    seconds: float = 0.0

    def add(self, generations: list["Generation"]) -> None:
        """Takes a batch in."""
        metrics = generations[0].metrics  # times and experts are those of the batch
        self.sequences += len(generations)
        self.generated_tokens += sum(each.metrics.generated_tokens for each in generations)
        self.num_forwards += sum(each.num_forwards for each in generations)
        self.decode_forwards += metrics.experts.decode.forwards
        self.prefill_forwards += metrics.experts.prefill.forwards
        self.requests += sum(metrics.experts.decode.requests)
        self.seconds += metrics.prefill_seconds + metrics.decode_seconds

    def to_json(self, writer: "TraceWriter", engine: "Engine", out: Path) -> dict[str, Any]:
        """What ``--json`` prints; ``seconds`` without compilation, ``working_set`` as ``ExpertTraffic`` has it."""
        places = self.decode_forwards * len(engine.config.moe_layers)
        return {
            "out": str(out),
            "rows": writer.rows,
            "tokens_per_row": writer.tokens_per_row,
            "num_experts": engine.config.num_experts,
            **{name: value for name, value in dataclasses.asdict(self).items() if name != "requests"},
            "tokens_per_forward": self.generated_tokens / max(1, self.num_forwards),
            "working_set": self.requests / max(1, places),
            "bytes": out.stat().st_size,
            "routing": engine.experts.metrics().routing,
        }


def _record(
    args: argparse.Namespace,
    ready: Prepared,
    engine: "Engine",
    writer: "TraceWriter",
    totals: _Totals,
    compiling: CompileLine,
    out: Path,
) -> None:
    """Generates batch after batch; ``totals`` and ``writer`` hold those that are finished, whatever happens."""
    line = _Line(len(ready.requests), engine, writer, compiling)

    def listen(record: Any) -> None:
        with _writing(out):
            writer.add(record)
        line.show(totals.sequences)

    try:
        for places in batches(ready.requests, args.batch_size):
            described = [_described(args, ready, place) for place in places]
            with writer.batch(described):
                generations = engine.generate_batch(
                    [ready.prompts[place] for place in places],
                    ready.rule,
                    gen_length=min(ready.gen_lengths[place] for place in places),
                    seeds=[ready.requests[place].seed for place in places],
                    allow_special_ids=args.allow_special_ids,
                    on_record=listen,
                )
                for about, generation in zip(described, generations, strict=True):
                    about |= _outcome(generation)
            totals.add(generations)
    finally:
        line.close()


def _described(args: argparse.Namespace, ready: Prepared, place: int) -> dict[str, Any]:
    """What the trace says of one prompt, before it is answered."""
    request = ready.requests[place]
    known = {"task": request.task, "split": request.split, "id": request.id}
    if args.store_prompts:
        known["prompt"] = request.text
    known = {name: value for name, value in known.items() if value is not None}
    return {**known, "seed": request.seed, "prompt_tokens": len(ready.prompts[place])}


def _outcome(generation: "Generation") -> dict[str, Any]:
    return {
        "generated_tokens": len(generation.tokens),
        "num_forwards": generation.num_forwards,
        "num_commits": generation.num_commits,
        "finished": generation.finished,
    }


class _Line:
    """Progress on standard error: rewritten in place on a terminal, a line now and then elsewhere."""

    def __init__(self, prompts: int, engine: "Engine", writer: "TraceWriter", compiling: CompileLine):
        self._prompts, self._engine, self._writer, self._compiling = prompts, engine, writer, compiling
        self._terminal = sys.stderr.isatty()
        self._start = self._shown = time.monotonic()

    def show(self, done: int) -> None:
        """After a forward; ``done`` prompts are finished."""
        self._compiling.clear()
        now = time.monotonic()
        if now - self._shown < (_TERMINAL_SECONDS if self._terminal else _LOG_SECONDS):
            return
        self._shown = now
        rate = self._writer.forwards / max(now - self._start - self._engine.programs.compile_seconds, 1e-9)
        text = (
            f"tracing: {done} of {counted(self._prompts, 'prompt')}, {counted(self._writer.forwards, 'forward')} "
            f"({rate:.3g}/s), {format_bytes(self._writer.nbytes)}"
        )
        sys.stderr.write(f"\r{text}\x1b[K" if self._terminal else f"{text}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Removes the line from a terminal."""
        if self._terminal and self._shown > self._start:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _checked_out(args: argparse.Namespace) -> Path:
    """``--out`` as a path that may be written."""
    text, out = args.out, Path(args.out)
    if not out.name.endswith(SUFFIXES) or out.name in SUFFIXES or "\0" in text:
        raise OledError(f"--out {text!r}: give a file whose name ends in {' or '.join(SUFFIXES)}")
    if not out.parent.is_dir():
        raise OledError(f"--out {text}: {out.parent} is not a folder: make it first")
    if out.parent.resolve().is_relative_to(Path(args.model).resolve()):
        raise OledError(f"--out {text} lies in the folder of --model: name a file elsewhere")
    with _writing(out), contextlib.suppress(FileNotFoundError):
        temporary_name(out).lstat()  # the longer name is asked for only at the end, and may be too long
    if out.is_dir():
        raise OledError(f"--out {text} is a folder: name a file in it")
    if os.path.lexists(out):
        if not args.force:
            raise OledError(f"--out {text} exists: name another file, or replace it with --force")
        if not _is_trace(out):
            raise OledError(f"--out {text} exists and is no trace, which --force does not replace: name another file")
    return out


def _is_trace(path: Path) -> bool:
    """Whether the header of a file is that of a trace; one that is damaged further on is one, and an empty file too."""
    from oled_jax.lab.trace import FORMAT

    try:
        with open(open_regular(path), "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            content = gzip.GzipFile(fileobj=file) if zipped else file
            start = content.read(8)
            if not start:
                return True
            about = json.loads(content.read(min(int.from_bytes(start, "little"), _MOST_HEADER)))["__metadata__"]
            return about.get("format") == FORMAT or "trace" in about
    except (OSError, EOFError, zlib.error, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return False


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    """What the system refuses inside is told as a problem of ``--out``."""
    try:
        yield
    except OSError as error:
        raise OledError(f"--out {out} cannot be written: {error.strerror or error}") from None


def _check_room(out: Path, ready: Prepared, args: argparse.Namespace) -> None:
    """OledError if not even the prompts fit on the disk; a note if answers that take their time would not."""
    from oled_jax.files import lacking_room
    from oled_jax.lab.recording import row_bytes

    config, length = ready.config, ready.rule.block_length
    sizes = (len(config.moe_layers), length, config.num_experts_per_tok)
    nbytes = 2 * row_bytes(*sizes, args.weights)  # the rows that wait, and the file
    prompts = sum(len(ids) // length + 1 for ids in ready.prompts)
    blocks = sum(-(-tokens // length) + 1 for tokens in ready.gen_lengths)
    problem = lacking_room(out.parent, prompts * nbytes, 1)
    if problem:
        raise OledError(f"--out {out}: {problem}")
    # A forward fills in one token at least, and one more may write keys and values.
    most = (prompts + blocks * (length + 1)) * nbytes
    problem = lacking_room(out.parent, most, 1)
    if problem:
        print(
            f"note: there may be too little room for {out}: if every token took a forward, {problem}", file=sys.stderr
        )
