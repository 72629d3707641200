"""What went wrong with workers, over HTTP."""

from fastapi import APIRouter
from starlette.responses import Response

from moeray.api.control import ControlClient
from moeray.api.errors import no_controller
from moeray.api.formats import encode_json
from moeray.comm.errors import MoerayError


class Faults:
    """The handler, with what it needs."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control

    def routes(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/faults", self.faults, methods=["GET"])
        return router

    async def faults(self) -> Response:
        """All that are remembered, the newest last."""
        try:
            views = await self._control.faults()
        except MoerayError as error:
            raise no_controller(error) from error
        return Response(encode_json({"faults": views}), media_type="application/json")
