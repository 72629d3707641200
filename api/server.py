"""The application: settings and a way to the controller in, an ASGI app out."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware import Middleware

import moeray
from moeray.api.control import ControlClient
from moeray.api.defaults import SamplingDefaults
from moeray.api.errors import install_error_handlers
from moeray.api.faults import Faults
from moeray.api.front_end import FrontEnd
from moeray.api.generation import Generation
from moeray.api.links import LinkFactory, SocketLinks
from moeray.api.metrics import FrontEndCollector, Metrics
from moeray.api.middleware import BodyLimit, KeyGuard, RefusalCounter, RequestId
from moeray.api.operations import Operations
from moeray.api.settings import ServerSettings
from moeray.api.status import Status
from moeray.api.tokenizer import load_tokenizer

# A front end that takes another's place listens when it can answer; who connects before waits in the backlog.
SETTLE_S = 2.0


def create_app(settings: ServerSettings, control: ControlClient, *, link_factory: LinkFactory | None = None) -> FastAPI:
    """An app that attaches to the deployment when it starts and serves as soon as a worker does.

    `app.state.front_end` is its `FrontEnd`: `begin_drain()`, `await drained(timeout_s)`, `cause()`. Raises
    `CheckpointError` if the tokenizer or generation_config.json cannot be read. Workers are reached over ZeroMQ
    unless a `link_factory` is given.
    """
    tokenizer = load_tokenizer(settings.model_path)
    defaults = SamplingDefaults.read(settings.model_path, settings.generation_config)
    metrics = Metrics()
    front_end = FrontEnd(settings, control, link_factory or SocketLinks(), metrics)
    metrics.registry.register(FrontEndCollector(front_end))
    generation = Generation(
        settings=settings, tokenizer=tokenizer, defaults=defaults, front_end=front_end, metrics=metrics
    )
    operations = Operations(settings=settings, control=control, front_end=front_end)
    status = Status(settings=settings, tokenizer=tokenizer, front_end=front_end, generation=generation, metrics=metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await front_end.start()
        await front_end.settle(SETTLE_S)
        yield
        await front_end.close()

    app = FastAPI(
        title="moeray",
        version=moeray.__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        # The handlers read bodies themselves, so a generated description would be empty; the docs page needs
        # a CDN.
        openapi_url=None,
        middleware=[
            Middleware(RequestId),
            Middleware(RefusalCounter, on_refused=metrics.on_refused),
            Middleware(KeyGuard, api_key=settings.api_key, admin_key=settings.admin_key),
            Middleware(BodyLimit, max_bytes=settings.max_body_bytes),
        ],
    )
    app.state.front_end = front_end
    install_error_handlers(app)
    app.include_router(generation.routes())
    app.include_router(status.routes())
    app.include_router(operations.routes())
    app.include_router(Faults(front_end.operations.told_faults).routes())
    return app
