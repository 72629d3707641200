"""Everything that is no generation: models, tokenising, health, topology, metrics. Answers in any state."""

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

import moeray
from moeray.api.errors import invalid, not_found
from moeray.api.formats import encode_json
from moeray.api.front_end import FrontEnd
from moeray.api.generation import Generation
from moeray.api.id_tokenizer import IDS_ONLY
from moeray.api.metrics import CONTENT_TYPE, Metrics
from moeray.api.parsing import parse
from moeray.api.schemas import DetokenizeRequest, TokenizeRequest
from moeray.api.settings import ServerSettings
from moeray.api.token_text import TokenText


def _json(body: object, status: int = 200) -> Response:
    headers = {"retry-after": "1"} if status == 503 else None
    return Response(encode_json(body), status, headers=headers, media_type="application/json")


class Status:
    """The handlers, with what they need."""

    def __init__(
        self,
        *,
        settings: ServerSettings,
        tokenizer: TokenText,
        front_end: FrontEnd,
        generation: Generation,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._front_end = front_end
        self._generation = generation
        self._metrics = metrics
        self._created = int(time.time())

    def routes(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/v1/models", self.models, methods=["GET"])
        router.add_api_route("/v1/models/{model_id:path}", self.model, methods=["GET"])
        router.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        router.add_api_route("/detokenize", self.detokenize, methods=["POST"])
        router.add_api_route("/health", self.health, methods=["GET", "HEAD"])
        router.add_api_route("/ready", self.ready, methods=["GET", "HEAD"])
        router.add_api_route("/version", self.version, methods=["GET"])
        router.add_api_route("/topology", self.topology, methods=["GET"])
        router.add_api_route("/metrics", self.metrics, methods=["GET"])
        return router

    async def models(self) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, model_id: str) -> Response:
        if model_id != self._settings.served_name:
            message = f"model is {model_id[:100]!r}, this server has {self._settings.served_name!r}"
            raise not_found(message, param="model", code="model_not_found")
        return _json(self._model())

    async def tokenize(self, http: Request) -> Response:
        """Token ids of a text, or of a conversation after the chat template."""
        fields = parse(TokenizeRequest, await http.body())
        self._generation.check_model(fields.model)
        try:
            tokens = await self._token_ids(fields)
        except ValueError as error:
            raise invalid(str(error), param="messages" if fields.prompt is None else "prompt") from error
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": self._max_model_len()})

    async def _token_ids(self, fields: TokenizeRequest) -> list[int]:
        if fields.prompt is not None:
            special = fields.add_special_tokens is not False
            return (await self._tokenizer.encode([fields.prompt], add_special_tokens=special))[0]
        return await self._tokenizer.encode_chat([message.for_template() for message in fields.messages or ()])

    async def detokenize(self, http: Request) -> Response:
        """Text of token ids, special tokens included unless `skip_special_tokens`."""
        fields = parse(DetokenizeRequest, await http.body())
        self._generation.check_model(fields.model)
        if not self._tokenizer.has_text:
            raise invalid(IDS_ONLY, param="tokens")
        vocab_size = self._tokenizer.vocab_size
        if fields.tokens and max(fields.tokens) >= vocab_size:
            message = f"tokens has token id {max(fields.tokens)}, must be from 0 to {vocab_size - 1}"
            raise invalid(message, param="tokens")
        skip = bool(fields.skip_special_tokens)
        return _json({"prompt": self._tokenizer.decode(fields.tokens, skip_special_tokens=skip)})

    async def health(self) -> Response:
        """200 while at least one worker serves, else 503 with the cause."""
        return self._state(self._front_end.cause())

    async def ready(self) -> Response:
        """200 while new requests are taken."""
        draining = "the server is shutting down" if self._front_end.is_draining else None
        return self._state(draining or self._front_end.cause())

    async def version(self) -> Response:
        return _json({"version": moeray.__version__})

    async def topology(self) -> Response:
        """Who serves which experts, as the controller told last."""
        view = self._front_end.view
        if view is None:
            return _json({"epoch": None, "members": [], "placement": []})
        members = [
            {
                "slot": member.slot,
                "rank": member.rank,
                "pid": member.pid,
                "node": member.node,
                "state": member.state,
                "num_requests": self._front_end.router.load((member.slot, member.incarnation)).num_sequences,
                "num_experts": member.num_experts,
            }
            for member in view.members
        ]
        return _json({"epoch": view.epoch, "members": members, "placement": view.placement})

    async def metrics(self) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    def _state(self, cause: str | None) -> Response:
        view = self._front_end.view
        body: dict[str, Any] = {
            "status": "ok" if cause is None else "unavailable",
            "cause": cause,
            "cluster": None if view is None else view.state,
            "epoch": None if view is None else view.epoch,
            "num_serving": self._front_end.availability.num_serving,
        }
        return _json(body, 200 if cause is None else 503)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._settings.served_name,
            "object": "model",
            "created": self._created,
            "owned_by": "moeray",
            "max_model_len": self._max_model_len(),
        }

    def _max_model_len(self) -> int | None:
        view = self._front_end.view
        return None if view is None or view.model is None else view.model.max_model_len
