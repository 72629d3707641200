"""The three ways to generate: /generate, /v1/completions, /v1/chat/completions. Validate, tokenise, submit, reply."""

import secrets
from collections.abc import Sequence

from fastapi import APIRouter, Request

from moeray.api.defaults import SamplingDefaults
from moeray.api.errors import invalid, not_found
from moeray.api.formats import GenerateFormat
from moeray.api.front_end import FrontEnd
from moeray.api.id_tokenizer import IDS_ONLY
from moeray.api.ledger import RequestEntry, SequenceEntry
from moeray.api.metrics import Metrics
from moeray.api.openai_formats import ChatFormat, CompletionFormat
from moeray.api.parsing import parse
from moeray.api.sampling import PromptLimits, check_prompt, sampling_params
from moeray.api.schemas import ChatRequest, CompletionRequest, GenerateRequest, SamplingFields
from moeray.api.settings import ServerSettings
from moeray.api.stop import StopMatcher
from moeray.api.streaming import Reply
from moeray.api.token_text import TokenText

GENERATE_MAX_TOKENS = 128
COMPLETION_MAX_TOKENS = 16


class Generation:
    """The handlers, with what they need."""

    def __init__(
        self,
        *,
        settings: ServerSettings,
        tokenizer: TokenText,
        defaults: SamplingDefaults,
        front_end: FrontEnd,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._front_end = front_end
        self._metrics = metrics

    def routes(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/generate", self.generate, methods=["POST"])
        router.add_api_route("/v1/completions", self.completions, methods=["POST"])
        router.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        return router

    async def generate(self, http: Request) -> Reply:
        """POST /generate: one prompt in text or token ids, one answer."""
        fields = parse(GenerateRequest, await http.body())
        self.check_model(fields.model)
        self._front_end.require_model()
        if fields.input_ids is not None:
            field, prompt_ids = "input_ids", list(fields.input_ids)
        else:
            field, prompt_ids = "prompt", (await self._encode([fields.prompt or ""]))[0]
        limits = PromptLimits(prompt_field=field, default_max_tokens=GENERATE_MAX_TOKENS)
        request = self._open(http, fields, [prompt_ids], limits)
        form = GenerateFormat(with_logprobs=fields.num_logprobs is not None)
        return self._reply(request, form, fields)

    async def completions(self, http: Request) -> Reply:
        """POST /v1/completions: one or more prompts, `n` answers to each."""
        fields = parse(CompletionRequest, await http.body())
        self.check_model(fields.model)
        self._front_end.require_model()
        prompts = fields.prompts()
        if not prompts:
            raise invalid("prompt is empty, must have at least one token", param="prompt")
        self._check_num_answers(len(prompts), fields.num_choices)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        prompt_ids = await self._encode(texts) if texts else [p for p in prompts if isinstance(p, list)]
        limits = PromptLimits(prompt_field="prompt", default_max_tokens=COMPLETION_MAX_TOKENS)
        request = self._open(http, fields, prompt_ids, limits)
        form = CompletionFormat(
            id_=f"cmpl-{secrets.token_hex(16)}",
            model=self._settings.served_name,
            tokenizer=self._tokenizer,
            with_logprobs=fields.num_logprobs is not None,
            include_usage=fields.include_usage,
            echoes=[self._text_of(prompt) for prompt in prompts] if fields.echo else (),
            num_choices=fields.num_choices,
        )
        return self._reply(request, form, fields)

    async def chat(self, http: Request) -> Reply:
        """POST /v1/chat/completions: a conversation, rendered with the checkpoint's chat template."""
        fields = parse(ChatRequest, await http.body())
        self.check_model(fields.model)
        self._front_end.require_model()
        self._check_num_answers(1, fields.num_choices)
        if unread := sorted(set(fields.chat_template_kwargs or {}) - self._tokenizer.template_variables):
            message = f"chat_template_kwargs has {', '.join(unread)}, which this model's chat template does not read"
            raise invalid(message, param="chat_template_kwargs")
        messages = [message.for_template() for message in fields.messages]
        try:
            prompt_ids = await self._tokenizer.encode_chat(messages, fields.chat_template_kwargs)
        except ValueError as error:
            raise invalid(str(error), param="messages") from error
        limits = PromptLimits(prompt_field="messages", default_max_tokens=None)
        request = self._open(http, fields, [prompt_ids], limits)
        form = ChatFormat(
            id_=f"chatcmpl-{secrets.token_hex(16)}",
            model=self._settings.served_name,
            tokenizer=self._tokenizer,
            with_logprobs=fields.num_logprobs is not None,
            include_usage=fields.include_usage,
        )
        return self._reply(request, form, fields)

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` (404) for a name that is not served; no name is the served one."""
        served = self._settings.served_name
        if name is not None and name != served:
            raise not_found(
                f"model is {name[:100]!r}, this server has {served!r}", param="model", code="model_not_found"
            )

    def _check_num_answers(self, num_prompts: int, num_choices: int) -> None:
        """Raises `ApiError` (400) for more than could be taken even if nothing else ran."""
        num_answers, most = num_prompts * num_choices, self._front_end.max_sequences()
        limit = min(self._settings.max_choices, most)
        if num_answers <= limit:
            return
        asked = f"n is {num_choices}" if num_prompts == 1 else f"prompt and n ask for {num_answers} answers"
        why = (
            f" (those that run at once, and max_queue ({self._settings.max_queue}) that wait)" if limit == most else ""
        )
        raise invalid(f"{asked}, must be at most {limit}{why}", param="n" if num_prompts == 1 else "prompt")

    async def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Raises `ApiError` (400) if there is no tokenizer."""
        try:
            return await self._tokenizer.encode(texts)
        except ValueError as error:
            raise invalid(str(error), param="prompt") from error

    def _text_of(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        if not self._tokenizer.has_text:
            raise invalid(f"echo has no text to give back: {IDS_ONLY}", param="echo")
        return self._tokenizer.decode(prompt)

    def _open(
        self,
        http: Request,
        fields: SamplingFields,
        prompts: Sequence[list[int]],
        limits: PromptLimits,
    ) -> RequestEntry:
        """Make the ledger's entry: one sequence per prompt and choice."""
        model = self._front_end.require_model()
        if fields.stops and not self._tokenizer.has_text:
            raise invalid(f"stop cannot be looked for: {IDS_ONLY}", param="stop")
        request = RequestEntry(request_id=http.scope["moeray.request_id"], arrived_s=http.scope["moeray.arrived_s"])
        for prompt_ids in prompts:
            check_prompt(prompt_ids, model, limits.prompt_field)
            params = sampling_params(
                fields, num_prompt_tokens=len(prompt_ids), model=model, limits=limits, defaults=self._defaults
            )
            for index in range(fields.num_choices):
                request.sequences.append(
                    SequenceEntry(
                        request=request,
                        seq_id=self._front_end.new_seq_id(),
                        choice=len(request.sequences),
                        index=index,
                        prompt_ids=prompt_ids,
                        sampling=params,
                        detokenizer=self._tokenizer.detokenizer(prompt_ids),
                        stop=StopMatcher(fields.stops, include=bool(fields.include_stop_str_in_output)),
                    )
                )
        return request

    def _reply(
        self,
        request: RequestEntry,
        form: GenerateFormat | CompletionFormat | ChatFormat,
        fields: SamplingFields,
    ) -> Reply:
        self._front_end.submit(request)
        return Reply(self._front_end, self._metrics, request, form, stream=bool(fields.stream))
