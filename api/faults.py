"""What went wrong with workers, over HTTP."""

from fastapi import APIRouter
from starlette.responses import Response

from moeray.api.errors import no_controller
from moeray.api.formats import encode_json
from moeray.api.kept import Kept
from moeray.comm.errors import MoerayError
from moeray.elastic.view import FaultView


class Faults:
    """The handler, with what it needs."""

    def __init__(self, told: Kept[tuple[FaultView, ...]]) -> None:
        self._told = told

    def routes(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/faults", self.faults, methods=["GET"])
        return router

    async def faults(self) -> Response:
        """All that are remembered, the newest last; with `age_s` and `reason` if the controller does not answer."""
        try:
            told = await self._told.soon()
        except MoerayError as error:
            raise no_controller(error) from error
        return Response(encode_json({"faults": told.value, **told.fields()}), media_type="application/json")
