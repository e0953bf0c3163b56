"""What clients ask for, read from the bodies of OpenAI's interface and its usual extensions."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from ..engine.grammar import Grammar
from ..errors import UsageError
from ..lora_config import MOST_SCALE
from ..sampler_names import MAX_SAMPLERS, describe_unknown, read_samplers
from ..sampling_config import SamplingParams
from .api_error import ApiError
from .chat_messages import MAX_MESSAGES, read_continuation, read_message
from .fields import Fields
from .output_form import read_grammar
from .prompt_fields import TextPrompt, read_bias, read_prompts
from .tools import Tool, ToolChoice, read_tool_choice, read_tools

if TYPE_CHECKING:
    from ..tokenizer.chat_template import Begun

_logger = logging.getLogger(__name__)

MAX_STOPS = 64  # an interface for several characters names them all
MAX_TOP_LOGPROBS = 20
MAX_PROBS = 100  # of ``n_probs``
# Numbers that llama-server bounds by nothing.
MAX_NUMBER = 1e9
MAX_TOKENS = 2**30
MAX_SCALES = 1024
MAX_ANSWERS = 16
_EFFORT = re.compile(r"[\w-]{1,64}", re.ASCII)
# Fields that would change the answer and have no meaning here.
_REFUSED: dict[str, object] = {
    **{"best_of": 1, "n": 1, "suffix": "", "audio": None, "functions": []},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt with everything that decides its answer; nothing in it was changed since."""

    kind: Literal["chat", "text"]
    messages: tuple[Mapping[str, Any], ...] = ()
    prompt: TextPrompt = ""
    sampling: SamplingParams
    place: int | None = None  # at which it is to be answered
    stream: bool = False
    include_usage: bool = False
    wants_progress: bool = False
    top_logprobs: int | None = None  # None: no logarithms at all
    shows_drawn: bool = False  # of what tokens were drawn from, after all filters
    bias: Mapping[int | str, float] = field(default_factory=dict)  # of texts: of their tokens
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    grammar: Grammar | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=lambda: ToolChoice("none"))
    echoes: bool = False  # its prompt, before the answer
    is_one_call: bool = False  # which ends the answer, where several are possible
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""  # by which name it asks for the model, or for an adapter
    lora: Mapping[int, float] = field(default_factory=dict)  # scales of adapters; none: as served
    continues: Begun | None = None  # of the last message: the answer is the rest of it
    begins_answer: bool = True  # behind the last message
    wants_timings: bool = False  # after every token


def read_chat_request(fields: Fields, defaults: SamplingParams) -> GenerationRequest:
    """A body of ``/v1/chat/completions``; ``defaults`` fill in what it leaves open.

    Raises ApiError for what cannot be served. Unknown fields are ignored, as clients expect.
    """
    messages = [read_message(each) for each in fields.objects("messages", MAX_MESSAGES)]
    top_logprobs = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    wants_logprobs = fields.flag("logprobs")
    if top_logprobs is not None and not wants_logprobs:
        raise ApiError("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    tools = read_tools(fields)
    return make_chat_request(
        fields,
        defaults,
        messages,
        "max_completion_tokens",
        top_logprobs=(top_logprobs or 0) if wants_logprobs else _read_probs(fields),
        tools=tools,
        tool_choice=read_tool_choice(fields, tools),
        is_one_call=not fields.flag("parallel_tool_calls", True),
        grammar=read_grammar(fields),
        template_variables=read_effort(fields, "reasoning_effort"),
    )


def make_chat_request(
    fields: Fields,
    defaults: SamplingParams,
    messages: Sequence[Mapping[str, Any]],
    *names_of_most: str,
    stop: str = "stop",
    goes_on: bool = True,
    template_variables: Mapping[str, Any],
    **read: Any,
) -> GenerationRequest:
    """The request of a conversation, whatever interface its ``messages`` came by.

    ``read`` are fields of the request that have another form in each of them; the others, and the
    usual extensions, are read here: ``names_of_most`` are names of the most tokens, ``stop`` that
    of the stop texts. ``chat_template_kwargs`` come before ``template_variables``. With ``goes_on``
    a last message of the assistant is the beginning of the answer. Raises ApiError.
    """
    if not messages:
        raise ApiError("'messages' must have at least one message", param="messages")
    if fields.flag("echo"):
        raise ApiError("'echo' is for /v1/completions; leave it out", param="echo")
    return GenerationRequest(
        kind="chat",
        messages=tuple(messages),
        template_variables={**template_variables, **fields.mapping("chat_template_kwargs")},
        **read_continuation(fields, messages, goes_on=goes_on),
        **read,
        **_read_common(fields, defaults, *names_of_most, stop=stop),
    )


def take_count(fields: Fields) -> tuple[Fields, int]:
    """How many answers are wanted, and the other fields. Raises ApiError."""
    n = fields.integer(fields.first("n_cmpl", "n"), 1, MAX_ANSWERS, 1) or 1
    return fields.without("n"), n


def repeat_request(request: GenerationRequest, n: int) -> list[GenerationRequest]:
    """Requests for ``n`` answers, whose seeds follow each other where there is one."""
    sampling = request.sampling
    if sampling.seed in (None, -1):
        return [request] * n
    seeds = [(sampling.seed + i) % 2**64 for i in range(n)]
    return [replace(request, sampling=replace(sampling, seed=seed)) for seed in seeds]


def read_effort(fields: Fields, name: str) -> Mapping[str, Any]:
    """How much a model is to think, as variables of chat templates: gpt-oss has the former."""
    effort = fields.text(name)
    if effort is not None and not _EFFORT.fullmatch(effort):
        fields.refuse(name, "an effort such as 'low' or 'high'")
    if effort == "none":
        return {"enable_thinking": False}
    return {} if effort is None else {"reasoning_effort": effort}


def read_text_requests(fields: Fields, defaults: SamplingParams) -> list[GenerationRequest]:
    """A body of ``/v1/completions`` of one prompt or several, each a request.

    Raises as ``read_chat_request``.
    """
    request = GenerationRequest(
        kind="text",
        echoes=fields.flag("echo"),
        top_logprobs=fields.integer("logprobs", 0, MAX_TOP_LOGPROBS, _read_probs(fields)),
        grammar=read_grammar(fields),
        **_read_common(fields, replace(defaults, max_tokens=_text_tokens(defaults))),
    )
    return [replace(request, prompt=prompt) for prompt in read_prompts(fields)]


def read_text_request(fields: Fields, defaults: SamplingParams) -> GenerationRequest:
    """As ``read_text_requests``, where one prompt is all that may be."""
    wanted = read_text_requests(fields, defaults)
    if len(wanted) > 1:
        fields.refuse("prompt", "one text, or one array of token ids")
    return wanted[0]


def read_completion_requests(
    fields: Fields, defaults: SamplingParams, prompt: tuple[int, ...] | None = None
) -> list[GenerationRequest]:
    """A body of llama-server's ``/completion``, its ``prompt`` perhaps made of other fields.

    Raises as ``read_chat_request``.
    """
    request = GenerationRequest(
        kind="text",
        top_logprobs=_read_probs(fields),
        shows_drawn=fields.flag("post_sampling_probs"),
        grammar=read_grammar(fields),
        **_read_common(fields, defaults, "n_predict"),
    )
    prompts = read_prompts(fields) if prompt is None else [prompt]
    return [replace(request, prompt=prompt) for prompt in prompts]


def _read_probs(fields: Fields) -> int | None:
    """How many likely tokens clients of llama-server want in the place of each; None: none."""
    return fields.integer("n_probs", 0, MAX_PROBS) or None


def _text_tokens(defaults: SamplingParams) -> int:
    """OpenAI's default of completions is 16; raw text of small models has no end of its own."""
    return 16 if defaults.max_tokens < 0 else defaults.max_tokens


def _read_common(
    fields: Fields, defaults: SamplingParams, *names_of_most: str, stop: str = "stop"
) -> dict[str, Any]:
    """``names_of_most``: names of ``max_tokens`` before that and that of llama-server."""
    for name, neutral in _REFUSED.items():
        if fields.raw(name) not in (None, neutral):
            raise ApiError(f"'{name}' is not supported; leave it out", param=name)
    options = fields.object("stream_options")
    stream = fields.flag("stream")
    place = fields.integer("id_slot", -MAX_TOKENS, MAX_TOKENS)  # below 0 it is any
    most = fields.first(*names_of_most, "max_tokens", "n_predict")
    sampling = _read_sampling(fields, defaults, most, fields.texts(stop, MAX_STOPS))
    presence, frequency = (
        fields.number(f"{name}_penalty", -2, 2, 0.0) for name in ("presence", "frequency")
    )
    penalises = "penalties" in sampling.acting_samplers
    model = fields.raw("model")
    return {
        "model": model if isinstance(model, str) else "",
        "lora": read_scales(fields),
        "place": None if place is None or place < 0 else place,
        "sampling": sampling,
        "stream": stream,
        "include_usage": options is not None and options.flag("include_usage"),
        "wants_timings": fields.flag("timings_per_token"),
        "wants_progress": fields.flag("return_progress")
        or (options is not None and options.flag("include_progress")),
        "bias": read_bias(fields),
        "presence_penalty": presence if penalises else 0.0,
        "frequency_penalty": frequency if penalises else 0.0,
    }


def read_scales(fields: Fields, name: str = "lora") -> Mapping[int, float]:
    """Scales by the number of their adapter, of an array as llama-server takes it.

    Of two of one adapter the latter counts. Raises ApiError.
    """
    scales = {}
    for each in fields.objects(name, MAX_SCALES):
        number = each.integer("id", 0, 2**31 - 1)
        scale = each.number("scale", -MOST_SCALE, MOST_SCALE)
        if number is None:
            each.refuse("id", "the number of an adapter")
        if scale is None:
            each.refuse("scale", "a number")
        scales[number] = scale
    return scales


def _read_sampling(
    fields: Fields, defaults: SamplingParams, most: str, stop: tuple[str, ...]
) -> SamplingParams:
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    given = {
        "temperature": fields.number("temperature", -MAX_NUMBER, MAX_NUMBER),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.integer("top_k", -1, 2**20),
        "min_p": fields.number("min_p", 0, 1),
        "repeat_penalty": fields.number(
            fields.first("repetition_penalty", "repeat_penalty"), 0.01, 10
        ),
        "repeat_last_n": fields.integer("repeat_last_n", -1, 2**20),
        "top_n_sigma": fields.number("top_n_sigma", -1, 1e6),
        "typical_p": fields.number("typical_p", 0, 1),
        "xtc_probability": fields.number("xtc_probability", 0, 1),
        "xtc_threshold": fields.number("xtc_threshold", 0, 1),
        "dynatemp_range": fields.number("dynatemp_range", 0, 100),
        "dynatemp_exponent": fields.number("dynatemp_exponent", 0, 100),
        "dry_multiplier": fields.number("dry_multiplier", 0, 100),
        "dry_base": fields.number("dry_base", 0, 100),
        "dry_allowed_length": fields.integer("dry_allowed_length", 0, 2**20),
        "dry_penalty_last_n": fields.integer("dry_penalty_last_n", -1, 2**20),
        "mirostat": fields.integer("mirostat", 0, 2),
        "mirostat_tau": fields.number("mirostat_tau", 0, 1000),
        "mirostat_eta": fields.number("mirostat_eta", 0, 1000),
        "adaptive_target": fields.number("adaptive_target", -1e6, 1),
        "adaptive_decay": fields.number("adaptive_decay", 0, 0.99),
        "max_tokens": fields.integer(most, -1, MAX_TOKENS),
        "seed": seed if seed in (None, -1) else seed % 2**64,  # -1 is random, as in llama-server
    }
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if values.get("temperature", 0) < 0:  # the likeliest token, as of 0
        values["temperature"] = 0.0
    for name in ("top_p", "typical_p"):
        if values.get(name) == 0:  # one token is left
            values[name] = 1e-9
    if values.get("dry_base", 1) < 1:  # off, as in llama-server
        values |= {"dry_multiplier": 0.0, "dry_base": 1.0}
    if fields.raw("dry_sequence_breakers") is not None:  # none at all is an empty array
        values["dry_sequence_breakers"] = fields.texts("dry_sequence_breakers", MAX_STOPS)
    if fields.raw("samplers") is not None:
        values["samplers"] = _read_samplers(fields)
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if values.get("max_tokens", -1) >= 0:
        values["max_tokens"] = min(values["max_tokens"], 2**20)
    try:
        return replace(
            defaults,
            **values,
            stop=stop or defaults.stop,
            ignore_eos=fields.flag("ignore_eos", defaults.ignore_eos),
        )
    except UsageError as error:
        raise ApiError(str(error)) from None


def _read_samplers(fields: Fields) -> tuple[str, ...]:
    """Names, or a text of letters; as llama-server's, it passes over others."""
    given = fields.raw("samplers")
    if not isinstance(given, str):
        is_list = isinstance(given, list) and all(isinstance(name, str) for name in given)
        if not is_list or len(given) > MAX_SAMPLERS:
            fields.refuse("samplers", f"a text of letters, or an array of at most {MAX_SAMPLERS}")
    known, unknown = read_samplers(given[: MAX_SAMPLERS + 1])
    if unknown:
        _tell_once(describe_unknown(unknown))
    return known


@lru_cache(maxsize=64)
def _tell_once(message: str) -> None:
    """A client says the same in every request."""
    _logger.warning("a request's 'samplers': %s", message)
