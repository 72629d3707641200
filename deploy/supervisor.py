"""`moeray serve`: starts a deployment, waits until it is told to end or something fails, ends all it started.

With `--attach` that is a front end alone, and the deployment goes on.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from moeray.api.settings import ServerSettings
from moeray.comm.errors import ControlTimeout, MoerayError, StartupError
from moeray.deploy import checkpoint, ports
from moeray.deploy.caretaker import Caretaker
from moeray.deploy.config import ServeConfig
from moeray.deploy.environment import check_faults
from moeray.deploy.front_end_keeper import FrontEndKeeper
from moeray.deploy.interrupts import Interrupted, Interrupts
from moeray.deploy.launch import check_resources, create_controller, find_controller, worker_factory
from moeray.deploy.loading import loaded_text, not_finite_text
from moeray.deploy.news import News
from moeray.deploy.progress import FRONT_END, RAY, StartProgress
from moeray.deploy.reserved import reserved_text
from moeray.elastic.controller_config import ControllerConfig, namespace
from moeray.elastic.member import WorkerFactory
from moeray.elastic.view import ClusterView, ModelView
from moeray.worker.models.config import ModelConfig

if TYPE_CHECKING:
    from moeray.deploy.control import RayControl
    from moeray.deploy.local import LocalRay

VIEW_POLL_S = 20.0
VIEW_RETRY_S = 1.0
RAY_POLL_S = 0.5
STOP_TIMEOUT_S = 15.0
FAILED_DRAIN_S = 2.0
FRONT_END_EXIT_S = 5.0
FRONT_END_START_S = 60.0
EXAMPLE_PROMPT = "It was a dark evening, and"
EXAMPLE_IDS = [1, 2, 3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that is decided before the first process starts. `factory` creates a worker's actor, `notes` are printed."""

    config: ServeConfig
    controller: ControllerConfig
    server: ServerSettings
    decoder: ModelConfig
    notes: checkpoint.Notes
    factory: WorkerFactory


def make_plan(config: ServeConfig) -> Plan:
    """Check the checkpoint, and all options against it. Raises `CheckpointError` or `ValueError`."""
    check_faults()
    path = checkpoint.resolve(config.model)
    decoder = checkpoint.inspect(path, config.model_impl)
    limit = decoder.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(f"max_model_len is {config.max_model_len}, must be at most the checkpoint's {limit}")
    worker = config.worker_config(model_path=str(path), num_experts=decoder.num_experts)
    controller = config.controller_config(worker, num_layers=decoder.num_moe_layers, num_experts=decoder.num_experts)
    return Plan(
        config=config,
        controller=controller,
        server=config.server_settings(model_path=str(path)),
        decoder=decoder,
        notes=checkpoint.notes(path, config.generation_config),
        factory=worker_factory(config, worker),
    )


def run(plan: Plan, console: Console) -> None:
    """The whole life of a deployment, from the main thread. Returns after an orderly end, else `MoerayError`.

    Either way nothing is left of what was started, except the logs after a failure.
    """
    directory = Path(tempfile.mkdtemp(prefix="moeray-"))
    keep = False
    with Caretaker(directory) as caretaker:
        try:
            Supervisor(plan, console, directory, caretaker).run()
        except MoerayError as error:
            keep = any(path.is_file() and path.stat().st_size for path in directory.rglob("*"))
            raise StartupError(f"{error} (logs in {directory})" if keep else str(error)) from error
        finally:
            if not keep:
                shutil.rmtree(directory, ignore_errors=True)


class Supervisor:
    """One deployment. Blocking work happens before and after the event loop, and may be interrupted."""

    def __init__(self, plan: Plan, console: Console, directory: Path, caretaker: Caretaker) -> None:
        self._plan = plan
        self._console = console
        self._directory = directory
        self._caretaker = caretaker
        self._ray: LocalRay | None = None
        self._interrupts = Interrupts()
        self._progress = StartProgress(console)
        self._news = News(console)
        self._is_serving = False
        self._has_given_way = False
        self._url = ""
        self._model: ModelView | None = None

    def run(self) -> None:
        """Raises `MoerayError`; returns after an interruption, also one that came while starting."""
        config = self._plan.config
        with self._interrupts, contextlib.ExitStack() as stack:
            listener = stack.enter_context(ports.listen(config.host, config.port))
            self._url = ports.url(config.host, listener)
            messages = stack.enter_context((self._directory / "ray-messages.log").open("w"))
            try:
                with self._progress:
                    front_end = FrontEndKeeper(listener, self._directory / "front-end.log", self._console)
                    stack.callback(front_end.kill)
                    # Ray prints news of dying workers; the user gets one line from us instead.
                    self._console.file = self._console.file  # the console follows sys.stdout unless told not to
                    stack.enter_context(contextlib.redirect_stdout(messages))
                    address = self._connect(stack)
                    asyncio.run(self._live(front_end, address))
            except (Interrupted, SystemExit):  # the latter from Ray's own handler of SIGTERM, set while it starts
                return
            finally:
                self._interrupts.end_at_once()

    def _connect(self, stack: contextlib.ExitStack) -> str:
        """Ray runs afterwards and this process is connected; returns its address."""
        from moeray.deploy import cluster, local

        config = self._plan.config
        self._progress.begin(RAY, "starting" if config.ray_address is None else "connecting")
        name = namespace(config.deployment)
        if config.ray_address is None:
            self._ray = local.LocalRay.start(self._directory, namespace=name, use_gpus=config.worker_gpus > 0)
            stack.callback(self._ray.stop)
            address = self._ray.address
            self._caretaker.watch(self._ray.processes())
        else:
            address = cluster.connect(config.ray_address, namespace=name)
            stack.callback(cluster.disconnect)
        if not config.attach:
            check_resources(config)
        self._progress.done(RAY, address)
        return address

    async def _live(self, front_end: FrontEndKeeper, address: str) -> None:
        from moeray.deploy.control import RayControl

        self._interrupts.attach(asyncio.get_running_loop())
        config = self._plan.config
        if config.attach:
            actor = find_controller(config.deployment, address)
        else:
            actor = create_controller(self._plan.controller, self._plan.factory)
        control = RayControl(actor)
        ended = asyncio.create_task(front_end.keep({**self._front_end_settings(), "ray_address": address}))
        serving = asyncio.Event()
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._serve(front_end, control, serving)),
            asyncio.create_task(self._watch(control, serving)),
            asyncio.create_task(self._interrupts.first.wait()),
            asyncio.create_task(self._watch_ray()),
        ]
        try:
            done, _ = await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
            self._check_ray()  # else whatever fails with it is taken for the cause
            for task in done:
                task.result()
            if front_end.is_superseded and not self._interrupts.first.is_set():
                await self._give_way(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end(front_end, ended, control, actor)

    async def _give_way(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Another front end serves the deployment. An embedded Ray and what runs in it stay with this process."""
        who = f"Another front end has taken deployment {self._plan.config.deployment} over"
        if self._ray is None:
            self._has_given_way = True
            self._say(f"{who}: this one ends, the deployment goes on.")
            return
        self._say(f"{who}. Ray and the workers live with this process: Ctrl-C ends them.")
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        self._check_ray()
        for task in done:
            task.result()

    async def _watch_ray(self) -> None:
        """For as long as the embedded Ray lives; raises when it does not. A cluster is watched by its own."""
        while True:
            self._check_ray()
            await asyncio.sleep(RAY_POLL_S)

    def _check_ray(self) -> None:
        if self._ray is not None and (dead := self._ray.dead()) is not None:
            raise StartupError(f"Ray's {dead} has died")

    @property
    def _has_ray(self) -> bool:
        """Whether anything of Ray's may be called, as far as is known: without its parts it ends this process."""
        return self._ray is None or self._ray.dead() is None

    def _front_end_settings(self) -> dict[str, Any]:
        return {
            "server": dataclasses.asdict(self._plan.server),
            "deployment": self._plan.config.deployment,
            "drain_timeout_s": self._plan.config.drain_timeout_s,
            "environment": {name: value for name, value in os.environ.items() if name.startswith("RAY_")},
        }

    async def _serve(self, front_end: FrontEndKeeper, control: "RayControl", serving: asyncio.Event) -> None:
        """Start all, tell the user when it serves, and stay."""
        if not self._plan.config.attach:
            await control.start()
        await serving.wait()
        self._progress.begin(FRONT_END, "connecting")
        try:
            async with asyncio.timeout(FRONT_END_START_S):
                await front_end.ready()
        except TimeoutError:
            raise StartupError(f"the front end did not become ready within {FRONT_END_START_S:g} s") from None
        self._progress.done(FRONT_END, f"pid {front_end.pid}")
        self._is_serving = True
        self._progress.close()
        self._announce()
        await asyncio.Event().wait()

    async def _watch(self, control: "RayControl", serving: asyncio.Event) -> None:
        """Follow the controller's view for as long as it serves; raises with the cause when it does not."""
        version = -1
        while True:
            try:
                view = await control.view(version, VIEW_POLL_S)
            except ControlTimeout:
                if not self._is_serving:
                    raise
                await asyncio.sleep(VIEW_RETRY_S)  # its process died, and Ray starts it again
                continue
            if view.version == version:
                continue
            version = view.version
            self._show(view)
            if view.state == "serving":
                serving.set()
            if view.state in ("failed", "stopping"):
                raise StartupError(view.cause or "the controller was told to stop by somebody else")

    def _show(self, view: ClusterView) -> None:
        config = self._plan.config
        if self._model is None and view.state == "serving" and view.model is not None:
            self._model = view.model
            if config.attach:
                checkpoint.check_served(self._plan.decoder, view.model, config.deployment)
        if self._is_serving:
            self._news.on_view(view)
        else:
            self._progress.on_view(view)

    async def _end(
        self, front_end: FrontEndKeeper, ended: asyncio.Task[None], control: "RayControl", actor: Any
    ) -> None:
        """Drain if it served and nothing failed; then the front end, the workers and the controller end."""
        import ray

        orderly = self._has_ray and self._is_serving and self._interrupts.first.is_set()
        drain_s = self._plan.config.drain_timeout_s
        if orderly:
            self._console.print(f"Finishing running requests, {drain_s:g} s at most. Ctrl-C again ends at once.")
        if self._has_ray:
            front_end.terminate()
            await self._wait(ended, drain_s + FRONT_END_EXIT_S if orderly else FAILED_DRAIN_S)
        front_end.kill()
        await asyncio.gather(ended, return_exceptions=True)
        if self._plan.config.attach or self._has_given_way or not self._has_ray:
            return
        embedded = self._plan.config.ray_address is None
        if not (embedded and self._interrupts.hurry.is_set()):
            stop = asyncio.create_task(control.stop(orderly=orderly))
            await self._wait(stop, STOP_TIMEOUT_S)
            stop.cancel()
            await asyncio.gather(stop, return_exceptions=True)  # Ray's end takes what is left with it
        if self._has_ray:
            ray.kill(actor, no_restart=True)

    async def _wait(self, task: asyncio.Task[Any], timeout_s: float) -> None:
        """Until the task is done, the time is over, or the user is in a hurry."""
        hurry = asyncio.create_task(self._interrupts.hurry.wait())
        await asyncio.wait([task, hurry], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()

    def _say(self, text: str, *, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _announce(self) -> None:
        config = self._plan.config
        prompt = {"prompt": EXAMPLE_PROMPT} if self._plan.notes.has_text else {"input_ids": EXAMPLE_IDS}
        body = json.dumps({**prompt, "max_tokens": 120, "stream": True})
        key = " -H 'authorization: Bearer '$MOERAY_API_KEY" if config.api_key else ""
        self._console.print(f"\n[bold]{config.served_name}[/bold] is served at [bold]{self._url}[/bold]")
        if self._model is not None and not config.attach:
            self._say(reserved_text(config, self._model), style="dim")
            self._say(loaded_text(self._model), style="dim")
        for note in self._plan.notes.lines:
            self._say(note, style="dim")
        if self._model is not None and self._model.not_finite:
            self._say(not_finite_text(self._model), style="yellow")
        self._console.print("Try it:\n")
        curl = f"curl -N {self._url}/generate{key} -H 'content-type: application/json' -d '{body}'"
        self._console.print(curl, soft_wrap=True, markup=False, highlight=False)
        if config.attach:
            self._say(f"\nIt has taken deployment {config.deployment} over: a front end that served it before ends.")
        what = f"this front end, deployment {config.deployment} goes on" if config.attach else "it"
        self._console.print(f"\nCtrl-C ends {what}.", style="dim", highlight=False)
