"""Where prompts come from, and that they arrive unchanged."""

from __future__ import annotations

import argparse
import io
import re
import sys
import warnings
from pathlib import Path

import pytest

from edgeh2o.cli.chat_options import read_template
from edgeh2o.cli.main import build_parser
from edgeh2o.cli.options import read_config
from edgeh2o.cli.parser import Parser
from edgeh2o.cli.prompt import MAX_PROMPT_BYTES, add_prompt_options, read_prompt
from edgeh2o.config import RuntimeConfig
from edgeh2o.errors import UsageError
from edgeh2o.sampling_config import SamplingParams


def _read(*arguments: str) -> str:
    parser = Parser()
    add_prompt_options(parser)
    return read_prompt(parser.parse_args(arguments))


@pytest.mark.parametrize("text", ["hello\n", "", "a\0b", "na\u00efve \U0001f600", "-"])
def test_text_is_taken_as_it_is(text: str) -> None:
    assert _read("-p", text) == text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"one\n", "one"),
        (b"one\n\n", "one\n"),
        (b"one\r\n", "one\r"),
        (b"a\0b \xc3\xa9", "a\0b \u00e9"),
        (b"\xef\xbb\xbfone\n", "one"),
        (b"\xef\xbb\xbf\xef\xbb\xbf", "\ufeff"),
        (b"", ""),
        (b"\n", ""),
    ],
)
def test_file_and_stdin_lose_one_newline(
    data: bytes, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(data)
    assert _read("-f", str(path)) == text
    for arguments in (["-"], ["-f", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
        assert _read(*arguments) == text


@pytest.mark.parametrize(
    "arguments",
    [
        ["M", "-"],
        ["M", "-t", "1", "-"],
        ["-t", "1", "-", "-n", "2", "M"],
        ["-m", "M", "-"],
        ["-", "-m", "M"],
        ["M", "--stop", "-", "-f", "-"],
        ["-f", "-", "--stop", "-", "--model", "M"],
    ],
)
def test_model_and_dash_may_stand_anywhere(arguments: list[str]) -> None:
    args = build_parser().parse_args(["run", *arguments])
    assert args.model == "M"
    assert "-" in (args.stdin, args.prompt_file)
    assert args.stop in (None, ["-"])


@pytest.mark.parametrize(
    "words",
    [
        "M in.jsonl -t 1 -o out --quiet",
        "-t 1 M --quiet in.jsonl -o out",
        "M -t 1 -o out in.jsonl --quiet",
        "--quiet -o out -m M -t 1 in.jsonl",
        "in.jsonl -o out --model=M -t1 --quiet",
    ],
)
def test_flags_may_stand_between_names(words: str) -> None:
    args = build_parser().parse_args(["batch", *words.split()])
    assert (args.model, args.input, args.output) == ("M", "in.jsonl", "out")
    assert (args.threads, args.quiet) == (1, True)


@pytest.mark.parametrize("text", ["-hello", "- one\n- two", "-n is a flag", "--temp=", "-", "-1"])
def test_texts_may_begin_with_a_dash(text: str) -> None:
    words = ["-p", text, "--stop", text, "-sys", text, "-n", "5"]
    args = build_parser().parse_args(["run", "M", *words])
    assert (args.model, args.prompt, args.system, args.stop) == ("M", text, text, [text])
    assert args.max_tokens == 5


def test_names_of_flags_that_llama_cpp_users_know() -> None:
    words = "-m M -r a --reverse-prompt b -sys s --predict 3 --ubatch-size 64 --temperature 0"
    args = build_parser().parse_args(["run", "--file", "f", *words.split()])
    assert (args.model, args.prompt_file, args.stop) == ("M", "f", ["a", "b"])
    assert (args.system, args.max_tokens, args.chunk_size, args.temperature) == ("s", 3, 64, 0.0)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (r"a\nb\tc\r\"\'", "a\nb\tc\r\"'"),
        (r"\\n \q \x4", r"\n \q \x4"),
        (r"caf\xc3\xa9 \x41", "caf\u00e9 A"),
        ("\ufeffa\n", "\ufeffa\n"),
    ],
)
def test_escapes_are_read_where_that_is_asked_for(text: str, read: str) -> None:
    assert _read("-e", "-p", text) == _read("--escape", "-p", text) == read
    assert _read("--no-escape", "-p", text) == text
    with pytest.raises(UsageError, match="--escape is for the prompt of -p"):
        _read("-e", "-f", "file")


def _parse(*words: str, verb: str = "run") -> tuple[argparse.Namespace, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        args = build_parser().parse_args([verb, "M", *words])
    return args, [str(warning.message) for warning in caught]


def test_flags_of_llama_cpp_become_ours() -> None:
    args, warned = _parse("--prompt-cache=s", "--prompt-cache-ro", "-no-cnv", "--seed", "-1")
    assert (args.session, args.session_read_only, args.chat) == ("s", True, False)
    assert read_config(args, SamplingParams).seed is None
    assert warned == []
    for flag, way in (("--context-shift", "shift"), ("--no-context-shift", "stop")):
        args, warned = _parse(flag)
        assert read_config(args, SamplingParams).context_full == way
        assert warned == []


@pytest.mark.parametrize(
    ("words", "types"),
    [
        ("-ctk q8_0 --cache-type-v f32", "q8_0/f32"),
        ("-ctk q8_0 -ctv q8_0", "q8_0"),
        ("--cache-type-k=q8_0", "q8_0/f16"),
        ("--cache-type q8_0 -ctv f16", "q8_0/f16"),
    ],
)
def test_keys_and_values_may_have_different_types(words: str, types: str) -> None:
    args, warned = _parse(*words.split())
    assert read_config(args, RuntimeConfig).cache_types == types
    assert warned == []


@pytest.mark.parametrize(
    "words", ["-ngl 0", "-fa", "-fa on", "--flash-attn", "--mlock", "--no-mmap", "-co"]
)
def test_flags_of_llama_cpp_without_effect_are_named(words: str) -> None:
    for verb in ("run", "bench"):
        args, (message,) = _parse(*words.split(), "-n", "3", verb=verb)
        assert args.model == "M"
        assert message.startswith(f"{words} has no effect: ")
    assert _parse("--no-warmup")[1] == ["--no-warmup has no effect: nothing is run to warm up"]
    assert _parse("--no-warmup", verb="bench")[1] == []  # it has such a flag


@pytest.mark.parametrize(
    "words",
    [
        *("--jinja", "-st", "-cb", "-kvu", "--metrics", "--no-webui", "--log-disable"),
        *("--keep -1", "--numa distribute", "--reasoning-format auto", "--reasoning-budget -1"),
        "-dev none",
        *("-sm none", "-nkvo", "-ncmoe 2", "-ngld 0", "-lv 1", "--swa-full", "--offline"),
        *("--no-slots", "-no-kvu", "-fit off", "-ctxcp 8", "--no-cache-idle-slots", "-cram -1"),
        *("--sleep-idle-seconds 60", "--spec-type draft-simple", "--spec-draft-n-min 2"),
        *("--prefill-assistant", "--no-mmproj", "--log-colors off", "-bs", "--no-cache-prompt"),
        *("--display-prompt", "--no-show-timings", "-ptc 8", "-if", "-mli", "--prompt-cache-all"),
        *("-lzm on", "-ncffn 4", "--image-max-tokens 64", "--kl-divergence", "-fitp on"),
        *("--spec-draft-prio 2", "--reasoning-budget-message end", "--kv-unified-per-slot 64"),
    ],
)
def test_flags_of_newer_commands_without_effect_are_named(words: str) -> None:
    """Most were unknown; -st was taken for ``-s t``."""
    for verb in ("run", "serve"):
        args, (message,) = _parse(*words.split(), "-n", "3", verb=verb)
        assert args.model == "M" and read_config(args, SamplingParams).max_tokens == 3
        assert message.startswith(f"{words} has no effect: ")


def test_flags_of_newer_commands_become_ours() -> None:
    words = "--top-nsigma 1.5 --typical 0.9 --xtc-probability 0.5 --dynatemp-exp 2"
    sampling = read_config(_parse(*words.split())[0], SamplingParams)
    assert (sampling.top_n_sigma, sampling.typical_p) == (1.5, 0.9)
    assert (sampling.xtc_probability, sampling.dynatemp_exponent) == (0.5, 2)
    for given, breakers in (
        ((), ("\n", ":", '"', "*")),
        (("none",), ()),
        (("a", "b "), ("a", "b ")),
    ):
        words = [word for text in given for word in ("--dry-sequence-breaker", text)]
        sampling = read_config(_parse(*words, "--dry-multiplier", "1")[0], SamplingParams)
        assert sampling.dry_sequence_breakers == breakers
    args, warned = _parse("-cnv", "--grammar-file", "g.gbnf")
    assert (args.chat, args.grammar, warned) == (True, "g.gbnf", [])
    assert _parse("-jf", "s.json")[0].json_schema == "s.json"
    args, warned = _parse("-np", "3", "-a", "name", "-to", "60", verb="serve")
    assert (args.parallel, args.alias, args.timeout, warned) == (3, "name", 60, [])
    words = "-cram 512 --cors-origins a,b --spec-draft-model d.gguf --spec-draft-n-max 16 -rea off"
    args, warned = _parse(*words.split(), verb="serve")
    assert (args.prefix_cache_ram, args.cors, args.draft) == (512 * 2**20, ["a,b"], "d.gguf")
    assert (args.reasoning, warned) == ("off", [])
    assert read_config(args, SamplingParams).draft_tokens == "15"  # as many as are drafted here
    args, warned = _parse("--ctx_size", "64", "--top_k=3", "--cache_ram", "2", verb="serve")
    assert (read_config(args, RuntimeConfig).context_size, warned) == (64, [])
    assert (read_config(args, SamplingParams).top_k, args.prefix_cache_ram) == (3, 2 * 2**20)
    assert _parse("--mtp", "--log-verbose")[0].draft == "mtp"
    assert _parse("--chunks", "4", "-f", "x", verb="perplexity")[0].windows == 4
    assert _parse("-f", "x", verb="calibrate")[0].text == ["x"]
    assert _parse("-cnv", verb="chat")[1] == [
        "-cnv has no effect: 'edgeh2o chat' is a conversation"
    ]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--reasoning-budget 0", "--reasoning off leaves it out"),
        ("-mg 1", "--device cuda:1 names it"),
        ("-cram 100", "--prefix-cache-ram"),
        ("--list-devices", "'edgeh2o doctor'"),
        ("--control-vector v.gguf", "leave it out"),
        ("--port 80", "it is for 'edgeh2o serve'; leave it out"),
        ("-np 4", "it is for 'edgeh2o serve'; leave it out"),
        ("--image cat.png", "models read text alone; leave it out"),
        ("-sysf system.txt", 'write --system "$(cat FILE)"'),
        ("--rpc 10.0.0.1:50052", "a model runs on one machine"),
        ("-hft hf_x", "set the variable HF_TOKEN"),
        ("-dr ai/smollm2", "'edgeh2o pull org/name:FILE'"),
        ("-o answer.txt", "answers go to stdout; write > FILE"),
        ("--chunks 4", "it is for 'edgeh2o perplexity'"),
        ("--eagle3", "--draft mtp"),
        ("--mmproj p.gguf", "models read text alone; leave it out"),
        ("--tools all", "tools are run by clients; leave it out"),
        ("--no-prefill-assistant", "continue_final_message"),
        ("--fim-qwen-7b-default", "-hf org/name:FILE"),
    ],
)
def test_flags_of_newer_commands_are_refused_with_the_cure(words: str, part: str) -> None:
    with pytest.raises(UsageError, match=f"^{words}: .*{re.escape(part)}"):
        _parse(*words.split())


@pytest.mark.parametrize("verb", ["run", "chat", "serve", "batch"])
def test_a_template_is_a_file_its_text_or_chatml(tmp_path: Path, verb: str) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    command = [verb, "M", *(["requests", "-o", "x"] if verb == "batch" else [])]

    def read(*words: str) -> dict[str, object]:
        return read_template(build_parser().parse_args([*command, *words]))

    assert read() == {"chat_template": None, "chat_template_kwargs": None}
    for given in (str(file), "{{ messages }}"):
        assert read("--chat-template", given)["chat_template"] == "{{ messages }}"
    assert "<|im_start|>" in str(read("--chat-template", "chatml")["chat_template"])
    with pytest.raises(UsageError, match="check --chat-template"):
        read("--chat-template", "llama3")
    for word, variables in (
        ("on", {"enable_thinking": True}),
        ("off", {"enable_thinking": False}),
        ("auto", None),
    ):
        assert read("--reasoning", word)["chat_template_kwargs"] == variables
    more = ("--reasoning", "off", "--chat-template-kwargs", '{"a": 1, "enable_thinking": true}')
    assert read(*more)["chat_template_kwargs"] == {"a": 1, "enable_thinking": True}


def test_the_order_of_samplers_is_read_as_by_llama_cpp() -> None:
    def read(*words: str, verb: str = "run") -> tuple[object, list[str]]:
        args, warned = _parse(*words, verb=verb)
        return read_config(args, SamplingParams).samplers, warned

    wanted = ("temperature", "top_k", "min_p")
    for words in (
        ("--samplers", "temperature;top_k;min_p"),
        ("--samplers=Temp;top-k; minp;",),
        ("--sampler-seq", "tkm"),
        ("--sampling-seq=tkm",),
    ):
        for verb in ("run", "serve"):
            assert read(*words, verb=verb) == (wanted, [])
    assert read("--samplers", "") == ((), [])
    known, (message,) = read("--samplers", "top_k;tfs_z;infill;tfs_z")
    assert known == ("top_k",)
    assert message.startswith("--samplers: no such sampler: 'tfs_z', 'infill'; there are penalties")
    known, (message,) = read("--sampler-seq", "kz")
    assert known == ("top_k",) and "'z'" in message
    with pytest.raises(UsageError, match="has 33 names, more than 32"):
        read("--sampler-seq", "k" * 33)


def test_mirostat_is_read_as_by_llama_cpp() -> None:
    words = "--mirostat 2 --mirostat-lr 0.2 --mirostat-ent 3"
    for verb in ("run", "serve", "chat"):
        args, warned = _parse(*words.split(), verb=verb)
        sampling = read_config(args, SamplingParams)
        assert (sampling.mirostat, sampling.mirostat_eta, sampling.mirostat_tau) == (2, 0.2, 3)
        assert warned == []
    assert read_config(_parse("--mirostat", "0")[0], SamplingParams) == SamplingParams()


def test_adaptive_p_is_read_as_by_llama_cpp() -> None:
    words = "--sampler-seq kma --adaptive-target 0.3 --adaptive-decay 0.5"
    for verb in ("run", "serve", "chat"):
        args, warned = _parse(*words.split(), verb=verb)
        sampling = read_config(args, SamplingParams)
        assert sampling.samplers == ("top_k", "min_p", "adaptive_p") and warned == []
        assert (sampling.adaptive_target, sampling.adaptive_decay) == (0.3, 0.5)
    assert read_config(_parse("--adaptive-target", "-1")[0], SamplingParams) == SamplingParams()


def test_biases_and_penalties_of_llama_cpp() -> None:
    words = [
        "-l",
        "15043+1",
        "--logit-bias",
        "2-100",
        "--presence-penalty",
        "0.5",
        "--frequency-penalty=-1",
    ]
    args, warned = _parse(*words)
    assert warned == []
    assert read_config(args, SamplingParams) == SamplingParams(
        presence_penalty=0.5, frequency_penalty=-1, logit_bias={15043: 1, 2: -100}
    )
    with pytest.raises(UsageError, match="'15043' is not a token id with what is added to it"):
        _parse("-l", "15043")
    for word in ("--presence-penalty 1.5", "-l 5+1"):  # it would be that of every request
        with pytest.raises(UsageError, match=f"^{re.escape(word)}: each request has its own"):
            _parse(*word.split(), verb="serve")


def test_texts_that_look_like_flags_of_llama_cpp_stay() -> None:
    args, warned = _parse("-p", "-fa", "--stop", "-mu")
    assert (args.prompt, args.stop, warned) == ("-fa", ["-mu"], [])
    with pytest.raises(UsageError, match="-no-cnv: 'edgeh2o run' answers a prompt"):
        _parse("-no-cnv", verb="chat")


@pytest.mark.parametrize(
    ("verb", "word", "part"),
    [("needle", "-ct", "arguments: -ct"), ("run", "-sy", "-sy .did you mean --system")],
)
def test_flags_with_one_dash_have_no_abbreviations(verb: str, word: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        build_parser().parse_args([verb, "M", word, "f16"])


@pytest.mark.parametrize("verb", ["needle", "bench"])
def test_a_context_is_refused_where_others_say_it(verb: str) -> None:
    with pytest.raises(UsageError, match=r"^-c 4096: the context is as long as what is read"):
        build_parser().parse_args([verb, "M", "-c", "4096"])


def test_a_file_that_is_too_long_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    with path.open("wb") as file:
        file.truncate(MAX_PROMPT_BYTES + 1)
    with pytest.raises(UsageError, match=f"^{path} has more than"):
        _read("-f", str(path))
