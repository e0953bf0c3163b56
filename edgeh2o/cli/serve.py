"""``edgeh2o serve``: answers requests over HTTP, by the interfaces of OpenAI and Anthropic."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import EdgeH2OError, UsageError
from ..sampling_config import SamplingParams
from .chat_options import add_template_options, read_template
from .embed import add_vector_options
from .model_options import (
    ModelOptions,
    add_draft_option,
    add_model_argument,
    add_model_options,
    add_verbosity_options,
    check_together,
    open_model,
    print_note,
    read_model_options,
    read_sampling,
)
from .options import utf8_text
from .prompt import read_text
from .serving_options import add_sampling_defaults, model_name, note_profile, parse_size

if TYPE_CHECKING:
    from ..engine.session import Session
    from ..serving.server_settings import ServerSettings

HELP = "answer requests over HTTP (interfaces of OpenAI and Anthropic)"
DESCRIPTION = (
    "Serve a model over HTTP in the forms of OpenAI's interfaces and Anthropic's: "
    "/v1/chat/completions, /v1/responses, /v1/messages, /v1/completions, /v1/embeddings, "
    "/v1/models, /health, /metrics. Needs edgeh2o[serve]."
)
EXAMPLES = """\
  edgeh2o serve model.gguf
  edgeh2o serve model.gguf -c 16384 --host 0.0.0.0 --api-key-file key.txt"""
_HOST = "127.0.0.1"
_PACKAGES = ("starlette", "uvicorn", "prometheus_client", "llguidance")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    add_model_argument(parser)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host",
        action="append",
        metavar="HOST",
        help="address to listen on, several with commas between them, or a path that ends in .sock "
        f"for a UNIX socket; may be given several times (default: {_HOST}, this machine alone)",
    )
    group.add_argument("--port", type=int, default=8080, metavar="N", help="(default: 8080)")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="what clients must send, or several with commas between them (better by "
        "EDGEH2O_API_KEY)",
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="read the key from a file, such as a secret's; several a line each",
    )
    group.add_argument(
        "--cors",
        action="append",
        metavar="ORIGIN",
        help="pages of this origin may call the server, several with commas between them, * for "
        "all, localhost for those of this machine; may be given several times",
    )
    group.add_argument(
        "--alias",
        type=utf8_text,
        metavar="NAME",
        help="name of the model for clients, or several with commas between them (default: the "
        "file's)",
    )
    group.add_argument(
        "--tags",
        type=utf8_text,
        metavar="TAG,...",
        help="what lists of models say of it besides",
    )
    group.add_argument(
        "--lora-init-without-apply",
        action="store_true",
        help="adapters of --lora count nothing until POST /lora-adapters or a request says so",
    )
    group.add_argument(
        "--parallel",
        type=int,
        default=4,
        metavar="N",
        help="answered at once (default: 4)",
    )
    group.add_argument(
        "--max-queue", type=int, default=32, metavar="N", help="requests that wait (default: 32)"
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=0,
        metavar="S",
        help="seconds that an answer may take, 0 = no limit (default: 0)",
    )
    group.add_argument(
        "--prefix-cache-ram",
        type=parse_size,
        metavar="SIZE",
        help="memory of conversations kept to go on from, such as 512M (default: a quarter of "
        "what is free once the model is loaded)",
    )
    group.add_argument(
        "--prefix-cache-disk",
        type=parse_folder,
        metavar="DIR,SIZE",
        help="folder, and how much of it, for conversations that memory has no room for and "
        "those of a server that ends (default: none)",
    )
    group.add_argument(
        "--slot-save-path",
        type=Path,
        metavar="FOLDER",
        help="where POST /slots/N?action=save and restore have files of slots by their names "
        "(default: nowhere)",
    )
    add_template_options(parser.add_argument_group("chat"))
    add_vector_options(parser.add_argument_group("vectors"))
    add_sampling_defaults(parser, has_draft=True)
    add_draft_option(parser)
    add_model_options(parser)
    add_verbosity_options(parser)


def execute(args: argparse.Namespace) -> int:
    """Loads the model and serves it until a signal comes; returns the exit code."""
    require_packages()
    _check_numbers(args)
    sampling = read_sampling(args)
    options = read_model_options(args)
    if args.lora_init_without_apply:
        idle = tuple(replace(adapter, scale=0.0) for adapter in options.runtime.lora)
        options = replace(options, runtime=replace(options.runtime, lora=idle))
    check_together(sampling, options)
    _check_folders(args)
    keys = _read_keys(args)
    hosts = split_names(",".join(args.host or (_HOST,)))
    if not hosts:
        raise UsageError("--host is empty; leave it out, or name an address")
    logging.getLogger("edgeh2o.serving").setLevel(logging.INFO if args.verbose else logging.WARNING)
    _serve(args, options, hosts, _make_settings(args, options.model, hosts, keys, sampling))
    return 0


def _check_numbers(args: argparse.Namespace) -> None:
    """Raises UsageError for those out of range."""
    from ..engine.embedding import RANK, require_known, require_power

    if args.pooling != RANK:
        require_known(args.pooling)
    require_power(args.embd_normalize)
    for flag, value, least in (
        ("--parallel", args.parallel, 1),
        ("--max-queue", args.max_queue, 0),
        ("--timeout", args.timeout, 0),
    ):
        if not least <= value <= 10**6:
            raise UsageError(f"{flag} must be at least {least}, got {value}")
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port must be from 0 to 65535, got {args.port}")


def _make_settings(
    args: argparse.Namespace,
    model: str,
    hosts: Sequence[str],
    keys: tuple[str, ...],
    sampling: SamplingParams,
) -> ServerSettings:
    """How requests are admitted; warns where everybody may send them."""
    from ..serving.listening import LOOPBACK, is_path, is_reachable
    from ..serving.server_settings import ServerSettings

    reachable = [host for host in hosts if is_reachable(host)]
    if reachable and not keys:
        print_note(
            f"edgeh2o: warning: everybody who reaches {', '.join(reachable)} can use the model; "
            "set EDGEH2O_API_KEY"
        )
    names = split_names(args.alias) or (model_name(model),)
    return ServerSettings(
        model_name=names[0],
        model_path=os.fsencode(model).decode("utf-8", "replace"),
        aliases=names,
        tags=split_names(args.tags),
        api_keys=keys,
        cors_origins=split_names(",".join(args.cors or ())),
        # No page of the web reaches a UNIX socket.
        allowed_hosts=None if reachable or all(map(is_path, hosts)) else (*LOOPBACK, "[::1]"),
        parallel=args.parallel,
        max_queue=args.max_queue,
        timeout_s=args.timeout,
        sampling=sampling,
        pooling=args.pooling,
        vector_power=args.embd_normalize,
    )


def _serve(
    args: argparse.Namespace, options: ModelOptions, hosts: Sequence[str], settings: ServerSettings
) -> None:
    """Listens on ``hosts``, loads the model, and serves it until a signal comes."""
    from ..serving.answers import AnswerEngine
    from ..serving.app import make_app
    from ..serving.listening import address_of, open_sockets
    from ..serving.loading_notice import LoadingNotice
    from ..serving.server import run_server

    opened: list[Session] = []
    template = read_template(args)
    # Before the weights are read.
    with open_sockets(hosts, args.port) as listening, ExitStack() as stack:
        loading = stack.enter_context(ExitStack())
        loading.enter_context(LoadingNotice(listening))
        _, bars = stack.enter_context(
            open_model(options, check=opened.append, must_write=False, **template)
        )
        bars.close()
        if opened[0].plan.config.is_causal:  # else there are vectors alone
            opened[0].check_options(settings.sampling)  # else every request would be refused
        note_profile(opened[0], is_quiet=args.quiet)
        engine = AnswerEngine(
            opened[0],
            prefix_ram_bytes=args.prefix_cache_ram,
            prefix_disk=args.prefix_cache_disk,
            slot_folder=args.slot_save_path,
        )
        addresses = " and ".join(map(address_of, hosts, listening))

        def announce() -> None:
            if not args.quiet:
                print_note(f"serving {settings.model_name} at {addresses} (Ctrl-C ends)")

        app = make_app(engine, settings)
        loading.close()
        run_server(app, listening, on_ready=announce)


def require_packages() -> None:
    """Raises an error with the command that installs what is missing."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise EdgeH2OError(f'serving needs {", ".join(missing)}: pip install "edgeh2o[serve]"')


def parse_folder(text: str) -> tuple[Path, int]:
    """A folder and bytes of "/var/cache/edgeh2o,20G", for argparse."""
    folder, comma, size = text.rpartition(",")
    if not comma or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is no folder and size such as /var/cache/x,20G")
    return Path(folder), parse_size(size)


def split_names(text: str | None) -> tuple[str, ...]:
    """The names of "one, two", each once."""
    names = (name.strip() for name in (text or "").split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def _check_folders(args: argparse.Namespace) -> None:
    """Raises UsageError where clients could name the files of kept conversations."""
    if args.slot_save_path is None or args.prefix_cache_disk is None:
        return
    if os.path.realpath(args.slot_save_path) == os.path.realpath(args.prefix_cache_disk[0]):
        raise UsageError(
            "--slot-save-path and --prefix-cache-disk need a folder each: clients name the files "
            "of the former"
        )


def _read_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Those of the flag, between commas, or of the file, a line each."""
    if args.api_key is not None and args.api_key_file is not None:
        raise UsageError("--api-key and --api-key-file exclude each other")
    keys = split_names(args.api_key)
    if args.api_key_file is not None:
        lines = read_text(args.api_key_file, flag="--api-key-file").splitlines()
        keys = tuple(line.strip() for line in lines if line.strip())
    if not keys and (args.api_key is not None or args.api_key_file is not None):
        raise UsageError("the API key is empty; set another one, or none")
    return keys
