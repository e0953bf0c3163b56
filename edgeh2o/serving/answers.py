"""Answers requests on the kept conversations, token by token, until done or given up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from ..engine.grammar import Grammar, compiler_of
from ..engine.logits import (
    DrawnProbabilities,
    LogitsProcessor,
    Penalties,
    ProcessorChain,
    TopLogProbabilities,
)
from ..engine.prompt import Prompt
from ..engine.saved_plan import plan_of_fingerprint
from .api_error import ApiError, PromptTooLongError
from .conversations import ConversationPool
from .prefix_disk import PrefixDisk
from .prompt_fields import join_prompt, resolve_bias
from .prompt_scores import score_prompt
from .questions import count_question
from .requests import GenerationRequest
from .scheduler import CancelledError, Scheduler
from .segment import Segment
from .segments import THINKING_BEGINS, THINKING_ENDS, AnswerParser
from .served_adapters import ServedAdapters
from .shared_runner import SharedRunner
from .slots import Slots
from .start_profile import profile_at_start
from .tools import describe_tools, grammar_of_call, write_calls_as_text

if TYPE_CHECKING:
    from ..engine.session import Session
    from ..engine.stats import GenerationStats


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token of an answer: its bytes, and natural logarithms of probabilities if asked for.

    ``top`` are (bytes, logarithm) of the most likely tokens in its place, ``top_ids`` which those
    are. The bytes are part of the answer's text if ``is_text``; those of control tokens are not.
    ``logprob`` is nan for the first token of a prompt, which nothing comes before.
    """

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    is_text: bool = True
    token_id: int = -1
    top_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token has made certain: text, and the token itself, unless it may be taken away.

    ``stats`` is what the answer has cost so far, if that was asked for.
    """

    segments: tuple[Segment, ...]
    record: TokenRecord | None = None
    token_id: int | None = None
    stats: GenerationStats | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens of the prompt that are read, cached ones left out of both, and in how long."""

    done: int
    total: int
    cached: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer: "stop", "length" or "tool_calls", and what it cost.

    ``stop_text`` is the one that ended it, if any did; ``prompt`` the text that it was to go on
    with, "" where that was token ids.
    """

    finish_reason: str
    stats: GenerationStats
    stop_text: str = ""
    prompt: str = ""


Event = Piece | Progress | Finished


class Ticket:
    """A request's right to go on; any thread may take it back."""

    def __init__(self) -> None:
        self.place = -1  # at which it is answered
        self.n_generated = 0  # so far
        self.most_tokens = -1  # of the answer; -1: as many as there are
        self._lock = Lock()
        self._runner: SharedRunner | None = None
        self._reason: str | None = None

    def cancel(self, reason: str) -> None:
        """Ends the request with a CancelledError, between two layers at the latest."""
        with self._lock:
            if self._reason is None:
                self._reason = reason
            if self._runner is not None:
                self._runner.cancel(self._reason)

    def attach(self, runner: SharedRunner | None) -> None:
        """The runner that the request has from now on; None: it has none any more."""
        with self._lock:
            self._runner = runner
            if runner is not None and self._reason is not None:
                runner.cancel(self._reason)

    def require(self) -> None:
        """Raises the CancelledError of a request that was given up."""
        if self._reason is not None:
            raise CancelledError(self._reason)


class AnswerEngine:
    """Answers requests of several threads on one copy of the weights."""

    def __init__(
        self,
        opened: Session,
        *,
        prefix_ram_bytes: int | None = None,
        prefix_disk: tuple[Path, int] | None = None,
        slot_folder: Path | None = None,
    ) -> None:
        """``prefix_disk`` is a folder and the most bytes that it may hold.

        ``slot_folder`` is where slots are saved by name; None: they are not. A model of which
        nothing is known is profiled first. Raises ResourceError for a folder that cannot be made.
        """
        profile_at_start(opened)
        find_plan = partial(plan_of_fingerprint, opened.plan, model=opened.model)
        disk = None if prefix_disk is None else PrefixDisk(*prefix_disk, find_plan)
        self.adapters = ServedAdapters(opened.adapters)
        self.scheduler = Scheduler()
        self.pool = ConversationPool(opened, self.scheduler, ram_bytes=prefix_ram_bytes, disk=disk)
        self.slots = Slots(self.pool, slot_folder, find_plan)
        self.tokenizer = opened.model.tokenizer
        self.grammars = compiler_of(self.tokenizer, opened.plan.config.vocab_size)

    def close(self) -> None:
        """Ends what is in progress with a CancelledError, once what is at rest is on the disk."""
        self.pool.close()
        self.scheduler.close()

    def open_prompt(self, request: GenerationRequest) -> Prompt:
        """The prompt of a request. Raises as ``PromptReader`` does."""
        with self.pool.prompt_lock:
            prompts = self.pool.prompts
            if request.kind == "text":
                text = request.prompt
                if not isinstance(text, str):
                    return prompts.open(join_prompt(text, self.tokenizer))
                return prompts.open(text)
            messages, variables = list(request.messages), dict(request.template_variables)
            offered = request.tools if request.tool_choice.mode != "none" else ()
            template = prompts.tool_template if offered else prompts.chat_template
            if not template.mentions("tools"):
                messages = write_calls_as_text(messages)
                if offered:
                    has_system_role = template.has_system_role
                    messages = describe_tools(messages, offered, has_system_role=has_system_role)
            elif offered:
                variables["tools"] = [dict(tool.source) for tool in offered]
            return prompts.open_chat(
                messages,
                variables,
                continues=request.continues,
                add_generation_prompt=request.begins_answer,
            )

    def answer(
        self, request: GenerationRequest, emit: Callable[[Event], None], ticket: Ticket
    ) -> None:
        """Calls ``emit`` with pieces and, at last, with ``Finished``; progress comes before.

        ``emit`` of progress is called in the scheduler's thread. Raises ApiError and the engine's
        errors, CancelledError once ``ticket`` is cancelled.
        """
        form, scales = self._grammar_of(request), self.adapters.scales_of(request)
        grammar = None if form is None else self.grammars.compile(form)
        processor, top = self._processors(request)
        shows_drawn = request.shows_drawn and request.top_logprobs is not None
        drawn = DrawnProbabilities(request.top_logprobs or 0) if shows_drawn else None
        prompt = self.open_prompt(request)
        ticket.require()
        asked = request.messages if request.continues is None else request.messages[:-1]
        n_question = count_question(prompt, asked)
        text = prompt.transcript.prompt if prompt.transcript is not None else ""
        begins_thoughts = text.rstrip().endswith(THINKING_BEGINS)
        begins_thoughts |= request.continues == "reasoning_content"
        choice = request.tool_choice
        tools = [tool for tool in request.tools if choice.allows(tool)]
        parser = AnswerParser(
            {tool.name: tool.parameters for tool in tools},
            is_call=choice.is_forced,
            is_plain=request.kind == "text",
            is_thinking=begins_thoughts and _may_end_thoughts(form),
        )
        sampling = request.sampling
        if grammar is not None:  # it says itself where an answer may end
            sampling = replace(sampling, ignore_eos=False)
        ticket.most_tokens = sampling.max_tokens
        if request.echoes:
            self._echo(request, scales, prompt, n_question, emit, ticket)
        borrowed = self.pool.borrow(
            prompt,
            sampling.max_tokens,
            adapter_scales=scales,
            n_question=n_question,
            slot=ticket.place,
            require=ticket.require,
        )
        with borrowed as conversation:
            shape = conversation.shape_of(prompt, n_question)
            begun_at = time.monotonic()

            def report(done: int, total: int) -> None:
                elapsed_s = time.monotonic() - begun_at
                emit(Progress(done, total, shape.n_tokens - total, elapsed_s))

            conversation.report.listener = report
            stream = conversation.session.stream(
                lambda: prompt,
                sampling,
                logprobs=top is not None,
                keep_cache=True,
                processor=processor,
                grammar=grammar,
                drawn=drawn,
            )
            runner = conversation.runner
            assert runner is not None
            runner.expect_prompt(shape)  # it may be another one now
            ticket.attach(runner)
            calls: list[Segment] = []
            ids: list[int] = []
            records: list[TokenRecord | None] = []
            n_told, stop_text = 0, ""
            try:
                for index, chunk in enumerate(stream):
                    ticket.require()
                    ticket.n_generated = chunk.generated_tokens
                    segments = parser.push(chunk.text)
                    if chunk.finish_reason is not None:
                        is_end = chunk.token_id in self.tokenizer.eog_ids
                        segments += parser.finish(is_cut=not is_end)
                    calls += [segment for segment in segments if segment.call is not None]
                    is_done = request.is_one_call and bool(calls)
                    if is_done:
                        del segments[segments.index(calls[0]) + 1 :], calls[1:]
                    record = None
                    if drawn is not None:
                        noted = drawn.logprobs[index], drawn.records[index]
                        record = self._record(chunk.token_id, *noted)
                    elif top is not None and chunk.logprob is not None:
                        record = self._record(chunk.token_id, chunk.logprob, top.records[index])
                    ids.append(chunk.token_id)
                    records.append(record)
                    certain = range(n_told, chunk.certain_tokens)
                    for i in certain[:-1]:  # a stop text might have taken them away
                        emit(Piece((), records[i], ids[i]))
                    emit(
                        Piece(
                            tuple(segments),
                            records[certain[-1]] if certain else None,
                            ids[certain[-1]] if certain else None,
                            stream.result().stats if request.wants_timings else None,
                        )
                    )
                    n_told, stop_text = max(n_told, chunk.certain_tokens), chunk.stop_text
                    if is_done:
                        break
                    is_last = chunk.finish_reason is not None
                    if not is_last and not self.pool.may_grow(conversation, ticket.require):
                        stream.cut()
                result = stream.result()
            finally:
                ticket.attach(None)
                stream.close()
                is_named = request.place is not None
                self.slots.note(ticket.place, conversation, is_named=is_named)
        is_called = bool(calls) and not calls[-1].is_cut
        reason = "tool_calls" if is_called else str(result.finish_reason)
        emit(Finished(reason, result.stats, stop_text, prompt.text))

    def _echo(
        self,
        request: GenerationRequest,
        scales: tuple[float, ...],
        prompt: Prompt,
        n_question: int,
        emit: Callable[[Event], None],
        ticket: Ticket,
    ) -> None:
        """The prompt as the beginning of the answer, its tokens with logarithms if asked for."""
        ids, text = prompt.encode().tolist(), request.prompt
        if len(ids) > self.pool.context_limit:
            raise PromptTooLongError(len(ids), self.pool.context_limit)
        if not isinstance(text, str):
            text = self.tokenizer.decode(ids)
        emit(Piece((Segment("text", text),)))
        if request.top_logprobs is None:
            return
        emit(Piece((), self._record(ids[0], math.nan, [])))
        scores = score_prompt(
            self.pool,
            ids,
            request.top_logprobs,
            adapter_scales=scales,
            max_tokens=request.sampling.max_tokens,
            n_question=n_question,
            require=ticket.require,
        )
        for token_id, (logprob, top) in zip(ids[1:], scores, strict=True):
            emit(Piece((), self._record(token_id, logprob, top)))

    def _processors(
        self, request: GenerationRequest
    ) -> tuple[LogitsProcessor | None, TopLogProbabilities | None]:
        """What changes and what notes the logits, in the order in which they are called."""
        processors: list[LogitsProcessor] = []
        top = None
        if request.top_logprobs is not None and not request.shows_drawn:
            top = TopLogProbabilities(request.top_logprobs)
            processors.append(top)
        if request.bias or request.presence_penalty or request.frequency_penalty:
            vocab_size = self.pool.plan.config.vocab_size
            biases = resolve_bias(request.bias, self.tokenizer)
            if any(token_id >= vocab_size for token_id in biases):
                raise ApiError(
                    f"'logit_bias' names a token beyond the vocabulary of {vocab_size}",
                    param="logit_bias",
                )
            processors.append(
                Penalties(
                    biases,
                    presence=request.presence_penalty,
                    frequency=request.frequency_penalty,
                )
            )
        return (ProcessorChain(processors) if processors else None), top

    @staticmethod
    def _grammar_of(request: GenerationRequest) -> Grammar | None:
        if request.tool_choice.is_forced:
            return grammar_of_call(request.tools, request.tool_choice)
        return request.grammar

    def _record(self, token_id: int, logprob: float, top: list[tuple[int, float]]) -> TokenRecord:
        read = self.tokenizer.token_bytes
        vocab_size = self.tokenizer.vocab_size
        named = tuple((read(i) if i < vocab_size else b"", value) for i, value in top)
        is_text = bool(read(token_id, skip_special=True))
        ids = tuple(i for i, _ in top)
        return TokenRecord(read(token_id), logprob, named, is_text, token_id, ids)


def _may_end_thoughts(form: Grammar | None) -> bool:
    """Whether an answer of that form may end the reasoning that its prompt began.

    One that may not is no reasoning: the client waits for text of the form.
    """
    return form is None or (form.kind != "json_schema" and THINKING_ENDS in form.text)


def usage_of(stats: GenerationStats) -> Mapping[str, Any]:
    """The object ``usage`` of an answer."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
    }
