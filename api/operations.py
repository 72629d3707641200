"""Changing size or placement over HTTP: start an operation, follow it, or wait as vLLM's and SGLang's users do."""

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from moeray.api.control import ControlClient
from moeray.api.errors import (
    ApiError,
    conflict,
    failed,
    invalid,
    no_controller,
    not_found,
    not_in_time,
    not_json,
    unavailable,
)
from moeray.api.formats import encode_json
from moeray.api.front_end import FrontEnd
from moeray.api.kept import Told, soon
from moeray.api.parsing import parse
from moeray.api.scale_schemas import RebalanceFields, ScaleElasticEPFields, ScaleFields
from moeray.api.settings import ServerSettings
from moeray.comm.errors import CapacityError, MoerayError, OperationRefused
from moeray.elastic.view import OperationView, RebalanceRequest, ScaleRequest

RETRY_S = 1.0
# An operation's deadline counts until the switch; then leavers end, and the controller tells.
AFTER_SWITCH_S = 120.0

FieldsT = TypeVar("FieldsT", bound=BaseModel)
RequestT = TypeVar("RequestT", ScaleRequest, RebalanceRequest)


def _location(operation_id: str) -> str:
    return f"/operations/{operation_id}" if operation_id else "/operations"


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(body), status, headers=headers, media_type="application/json")


def _started(view: OperationView) -> Response:
    return _json(view, 202 if view.outcome is None else 200, {"location": _location(view.operation_id)})


class Operations:
    """The handlers, with what they need."""

    def __init__(self, *, settings: ServerSettings, control: ControlClient, front_end: FrontEnd) -> None:
        self._settings = settings
        self._control = control
        self._front_end = front_end

    def routes(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/scale", self.scale, methods=["POST"])
        router.add_api_route("/rebalance", self.rebalance, methods=["POST"])
        router.add_api_route("/operations", self.operations, methods=["GET"])
        router.add_api_route("/operations/{operation_id:path}", self.operation, methods=["GET"])
        router.add_api_route("/scale_elastic_ep", self.scale_elastic_ep, methods=["POST"])
        router.add_api_route("/is_scaling_elastic_ep", self.is_scaling_elastic_ep, methods=["GET", "POST"])
        return router

    async def scale(self, http: Request) -> Response:
        """Start an operation: 202 while it runs, 200 if it is over, as a repeated id's or one with nothing to do."""
        fields = await self._parse(ScaleFields, http)
        request = ScaleRequest(
            workers=fields.workers,
            retire=tuple(fields.retire or ()),
            operation_id=fields.operation_id,
            deadline_s=fields.deadline_s,
        )
        field = "retire" if fields.workers is None else "workers"
        return _started(await self._start(self._control.scale, request, field))

    async def rebalance(self, http: Request) -> Response:
        """Start an operation that exchanges experts between the workers; answers as `scale` does."""
        fields = await self._parse(RebalanceFields, http)
        request = RebalanceRequest(operation_id=fields.operation_id, deadline_s=fields.deadline_s)
        return _started(await self._start(self._control.rebalance, request))

    async def operations(self) -> Response:
        """All that are remembered, the oldest first; with `age_s` and `reason` if the controller does not answer."""
        told = await self._history()
        return _json({"operations": told.value, **told.fields()})

    async def operation(self, operation_id: str) -> Response:
        """One of them, as above."""
        beside: dict[str, object] = {}
        try:
            view = await soon(self._control.operation(operation_id))
        except MoerayError as error:
            view, beside = self._kept(operation_id, error)
        if view is None:
            raise not_found(
                f"operation {operation_id[:128]!r} is unknown, it was never started or is forgotten",
                param="operation_id",
                code="operation_not_found",
            )
        return _json({**msgspec.structs.asdict(view), **beside})

    async def scale_elastic_ep(self, http: Request) -> Response:
        """Scale and wait for the end. 400, 408 and 500 mean what they do in vLLM; the old size serves on then."""
        fields = await self._parse(ScaleElasticEPFields, http)
        request = ScaleRequest(workers=fields.size)
        view = await self._end_of(await self._start(self._control.scale, request, fields.size_field))
        self._front_end.on_operation(view)
        if view.outcome != "done":
            raise _rolled_back(view)
        num_workers = len(view.targets)
        body = {
            "status": "ok",
            "success": True,
            "message": f"Scaled to {num_workers} data parallel engines",
            "new_data_parallel_size": num_workers,
            "old_ep_size": num_workers - len(view.joiners) + len(view.leavers),
            "new_ep_size": num_workers,
            "pending_ep_size": None,
            "operation_id": view.operation_id,
        }
        return _json(body)

    async def is_scaling_elastic_ep(self) -> Response:
        """Whether an operation runs, with the fields that SGLang's users read beside it."""
        views = (await self._history()).value
        last = views[-1] if views else None
        body: dict[str, Any] = {
            "is_scaling_elastic_ep": last is not None and last.outcome is None,
            "effective_ep_size": len(self._serving_slots()),
            "scale_phase": _scale_phase(last),
            "last_error": last.reason if last is not None and last.outcome not in (None, "done") else None,
        }
        return _json(body)

    # The controller's side

    async def _start(
        self, begin: Callable[[RequestT], Awaitable[OperationView]], request: RequestT, field: str | None = None
    ) -> OperationView:
        """What has begun. `field` is the one under which the size was given, or the slots that leave."""
        # With an id known here, a caller can find an operation whose beginning was not answered in time.
        operation_id = request.operation_id or uuid.uuid4().hex
        try:
            view = await begin(msgspec.structs.replace(request, operation_id=operation_id))
        except OperationRefused as error:
            known = self._front_end.view
            if not error.operation_id and (known is None or known.state != "serving"):
                raise unavailable(str(error), code="not_serving") from error
            raise conflict(str(error), location=_location(error.operation_id)) from error
        except (ValueError, CapacityError) as error:
            text = str(error)
            if field not in (None, "retire"):
                text = re.sub(r"\bworkers is\b", f"{field} is", text, count=1)
            raise invalid(text, param=field) from error
        except MoerayError as error:
            raise no_controller(error, f"; if it has begun, {_location(operation_id)} shows it") from error
        self._front_end.on_operation(view)
        return view

    async def _end_of(self, view: OperationView) -> OperationView:
        """The operation once it is over; a controller that does not answer, or is started anew, is asked again."""
        deadline = time.monotonic() + view.deadline_s + AFTER_SWITCH_S
        while view.outcome is None:
            if time.monotonic() > deadline:
                raise failed(
                    f"operation {view.operation_id} is still {view.phase}, {_location(view.operation_id)} shows it",
                    code="operation_running",
                )
            try:
                view = await self._control.wait_operation(view.operation_id, self._settings.view_poll_s)
            except ValueError as error:
                raise failed(str(error), code="operation_not_found") from error
            except MoerayError:
                await asyncio.sleep(RETRY_S)
        return view

    def _kept(self, operation_id: str, error: MoerayError) -> tuple[OperationView, dict[str, object]]:
        """The operation as it was heard of last, and how long ago; the controller does not answer by `error`."""
        with contextlib.suppress(MoerayError):
            told = self._front_end.operations.told_operations.last(error)
            for view in told.value:
                if view.operation_id == operation_id:
                    return view, told.fields()
        raise no_controller(error) from error

    async def _history(self) -> Told[tuple[OperationView, ...]]:
        try:
            return await self._front_end.operations.told_operations.soon()
        except MoerayError as error:
            raise no_controller(error) from error

    # Limits in words

    async def _parse(self, kind: type[FieldsT], http: Request) -> FieldsT:
        """As `parse`; what cannot even be a size or a list of slots is told the limits as well.

        The body must be called JSON (415): a browser sends that from a page of another site only if it may.
        """
        content_type = http.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            raise not_json(f"content-type is {content_type[:100]!r}, must be application/json")
        try:
            return parse(kind, await http.body())
        except ApiError as error:
            field = (error.param or "").partition(".")[0]
            if field not in ("workers", "retire", "new_data_parallel_size", "new_ep_size"):
                raise
            if field == "retire":
                limits = f"slots that can retire are {self._serving_slots()}"
            else:
                limits = f"must be an integer from {self._settings.min_workers} to {self._settings.max_workers}"
            raise invalid(f"{error.message} ({limits})", param=error.param, code=error.code) from error

    def _serving_slots(self) -> list[int]:
        view = self._front_end.view
        members = () if view is None else view.members
        return [member.slot for member in members if member.rank is not None and member.state != "dead"]


def _rolled_back(view: OperationView) -> ApiError:
    message = f"operation {view.operation_id} ended as {view.outcome}: {view.reason}"
    began, ended = view.started_at("planned"), view.started_at("rolled_back")
    if began is not None and ended is not None and ended - began >= view.deadline_s:
        return not_in_time(message)
    return failed(message, code=f"operation_{view.outcome}")


def _scale_phase(view: OperationView | None) -> str:
    """In SGLang's words once it is over, in the operation's own while it runs."""
    if view is None or (view.outcome is not None and view.outcome != "done"):
        return "serving"
    if view.outcome is None:
        return view.phase
    gained = len(view.joiners) - len(view.leavers)
    return "serving_expanded" if gained > 0 else "serving_shrunk" if gained < 0 else "serving"
