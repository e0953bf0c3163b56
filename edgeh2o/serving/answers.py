"""Answers requests on the kept conversations, token by token, until done or given up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine.grammar import Grammar, compiler_of
from ..engine.logits import (
    DrawnProbabilities,
    LogitsProcessor,
    Penalties,
    ProcessorChain,
    TopLogProbabilities,
)
from ..engine.prompt import Prompt
from ..engine.request_checks import require_writing
from ..engine.saved_plan import plan_of_fingerprint
from .answer_pieces import AnswerPieces, record_token
from .api_error import ApiError, PromptTooLongError
from .conversations import ConversationPool
from .events import Event, Finished, Piece, Progress
from .prefix_disk import PrefixDisk
from .prompt_fields import join_prompt, resolve_bias
from .prompt_scores import score_prompt
from .questions import count_question
from .requests import GenerationRequest
from .scheduler import Scheduler
from .segment import Segment
from .segments import THINKING_BEGINS, THINKING_ENDS, AnswerParser
from .served_adapters import ServedAdapters
from .slots import Slots
from .start_profile import profile_at_start
from .ticket import Ticket
from .tools import describe_tools, grammar_of_call, write_calls_as_text

if TYPE_CHECKING:
    from ..engine.access import GenerationStream
    from ..engine.session import Session
    from .conversation import Conversation


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

    def give_up_saving(self) -> None:
        """Has ``close`` wait for the disk no more, if it does; for signal handlers."""
        self.pool.give_up_saving()

    def open_prompt(self, request: GenerationRequest) -> Prompt:
        """The prompt of a request. Raises as ``PromptReader`` does."""
        given = request.prompt
        # Texts between token ids become tokens, which others do not wait for.
        text = given if isinstance(given, str) else join_prompt(given, self.tokenizer)
        with self.pool.prompt_lock:
            prompts = self.pool.prompts
            if request.kind == "text":
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
        require_writing(self.pool.plan.config)
        form, scales = self._grammar_of(request), self.adapters.scales_of(request)
        grammar = None if form is None else self.grammars.compile(form)
        processor, top = self._processors(request)
        shows_drawn = request.shows_drawn and request.top_logprobs is not None
        drawn = DrawnProbabilities(request.top_logprobs or 0) if shows_drawn else None
        prompt = self.open_prompt(request)
        ticket.require()
        asked = request.messages if request.continues is None else request.messages[:-1]
        n_question = count_question(prompt, asked)
        parser = _parser_of(request, prompt, form)
        pieces = AnswerPieces(
            self.tokenizer, parser, top=top, drawn=drawn, is_one_call=request.is_one_call
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
            conversation.report.listener = _progress_to(emit, shape.n_tokens)
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
            try:
                self._write(request, conversation, stream, pieces, emit, ticket)
                result = stream.result()
            finally:
                ticket.attach(None)
                stream.close()
                is_named = request.place is not None
                self.slots.note(ticket.place, conversation, is_named=is_named)
        reason, text = "tool_calls" if pieces.is_called else str(result.finish_reason), prompt.text
        if not isinstance(request.prompt, str):
            text = self.tokenizer.decode(prompt.encode().tolist())
        emit(Finished(reason, result.stats, pieces.stop_text, text))

    def _write(
        self,
        request: GenerationRequest,
        conversation: Conversation,
        stream: GenerationStream,
        pieces: AnswerPieces,
        emit: Callable[[Event], None],
        ticket: Ticket,
    ) -> None:
        """Reads ``stream`` to its end, or as far as the answer goes and memory has room for it."""
        for chunk in stream:
            ticket.require()
            ticket.n_generated = chunk.generated_tokens
            stats = stream.stats() if request.wants_timings else None
            for piece in pieces.take(chunk, stats):
                emit(piece)
            if pieces.is_done:
                return
            is_last = chunk.finish_reason is not None
            if not is_last and not self.pool.may_grow(conversation, ticket.require):
                stream.cut()

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
        emit(Piece((), record_token(self.tokenizer, ids[0])))
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
            emit(Piece((), record_token(self.tokenizer, token_id, logprob, top)))

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


def _progress_to(emit: Callable[[Event], None], n_tokens: int) -> Callable[[int, int], None]:
    """What tells ``emit`` how far a prompt of so many tokens is read, from now on."""
    begun_at = time.monotonic()

    def report(done: int, total: int) -> None:
        emit(Progress(done, total, n_tokens - total, time.monotonic() - begun_at))

    return report


def _parser_of(request: GenerationRequest, prompt: Prompt, form: Grammar | None) -> AnswerParser:
    """What tells apart the parts of an answer of that form."""
    text = prompt.transcript.prompt if prompt.transcript is not None else ""
    begins_thoughts = text.rstrip().endswith(THINKING_BEGINS)
    begins_thoughts |= request.continues == "reasoning_content"
    choice = request.tool_choice
    return AnswerParser(
        {tool.name: tool.parameters for tool in request.tools if choice.allows(tool)},
        is_call=choice.is_forced,
        is_plain=request.kind == "text",
        is_thinking=begins_thoughts and _may_end_thoughts(form),
    )


def _may_end_thoughts(form: Grammar | None) -> bool:
    """Whether an answer of that form may end the reasoning that its prompt began.

    One that may not is no reasoning: the client waits for text of the form.
    """
    return form is None or (form.kind != "json_schema" and THINKING_ENDS in form.text)
