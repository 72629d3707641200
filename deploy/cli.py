"""The command line. Options and environment variables are read here; everything else gets values.

Heavy imports happen inside the commands, so that `moeray --help` answers at once.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

import moeray
from moeray.comm.errors import MoerayError
from moeray.deploy.config import ServeConfig

app = typer.Typer(
    name="moeray",
    help="Serve Mixture-of-Experts language models with expert parallelism over Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cluster_app = typer.Typer(help="Start and stop Ray on this node.", no_args_is_help=True)
app.add_typer(cluster_app, name="cluster")

DEFAULT_URL = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option(envvar="MOERAY_URL", help="A running server.")]
ApiKey = Annotated[str | None, typer.Option(envvar="MOERAY_API_KEY", help="Key that guards generation.")]
DeadlineS = Annotated[float | None, typer.Option(help="Roll back if it has not switched by then.")]
Follow = Annotated[bool, typer.Option(help="Show the phases, and wait for the end.")]
AdminKey = Annotated[str | None, typer.Option(envvar="MOERAY_ADMIN_KEY", help="Key that guards control.")]


def _fail(message: object, context: typer.Context) -> NoReturn:
    """End with one line, in which options have the names that the user typed."""
    from moeray.deploy.options import in_typed_names, typed_names

    text = _plain(in_typed_names(str(message), typed_names(context)))
    Console(stderr=True, soft_wrap=True).print(f"[bold red]moeray:[/] {text}", highlight=False)
    raise typer.Exit(1)


def _plain(message: object) -> str:
    from rich.markup import escape

    return escape(" ".join(str(message).split()))


@app.command()
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="demo, a directory, or a hub name (owner/name).")] = "demo",
    workers: Annotated[int, typer.Option(help="Workers to start with.")] = 1,
    spares: Annotated[int, typer.Option(help="Further workers that wait, loaded, and join in under a second.")] = 0,
    max_workers: Annotated[int | None, typer.Option(help="Most workers ever. [max(2 x workers, 4)]")] = None,
    min_workers: Annotated[
        int | None,
        typer.Option(help="Fewest workers ever: each reserves room for its share of experts then."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any.")] = 8000,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name that clients use.")] = None,
    generation_config: Annotated[
        str, typer.Option(help="auto (sampling defaults from the checkpoint's generation_config.json) or none.")
    ] = "auto",
    deployment: Annotated[str, typer.Option(help="Tells deployments in one Ray cluster apart.")] = "default",
    ray_address: Annotated[
        str | None, typer.Option(help="A running Ray cluster (host:port, or auto). [an embedded one]")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="What is computed in: auto, fp32, bf16 or fp16.")] = "auto",
    weights: Annotated[str, typer.Option(help="What weights are stored in: auto, fp32, bf16 or fp16.")] = "auto",
    combine: Annotated[
        str, typer.Option(help="auto, exact (the same tokens for any number of workers) or fast.")
    ] = "auto",
    dispatcher: Annotated[str, typer.Option(help="auto, loopback, all_gather or all_to_all.")] = "auto",
    model_impl: Annotated[
        str, typer.Option(help="auto (native if there is such a family), native or transformers.")
    ] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt and output together. [the checkpoint's]")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences in a worker's step.")] = 128,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens in a worker's step.")] = 512,
    kv_cache_gib: Annotated[float | None, typer.Option(help="KV cache per worker. [from free memory]")] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the KV of equal prompt beginnings.")] = True,
    max_queue: Annotated[int, typer.Option(help="Most requests that wait; more get 429.")] = 1024,
    threads: Annotated[int, typer.Option(help="Threads of each worker's kernels.")] = 1,
    cpus_per_worker: Annotated[float | None, typer.Option(help="Ray CPUs that a worker takes of a cluster.")] = None,
    gpus_per_worker: Annotated[float | None, typer.Option(help="Ray GPUs that a worker takes.")] = None,
    start_timeout_s: Annotated[float, typer.Option(help="Deadline for loading the weights.")] = 600.0,
    drain_timeout_s: Annotated[float, typer.Option(help="How long running requests may take at the end.")] = 30.0,
    orphan_timeout_s: Annotated[float, typer.Option(help="Workers without a front end leave after this.")] = 60.0,
    recovery_timeout_s: Annotated[float, typer.Option(help="How long requests wait while nothing serves.")] = 30.0,
    stall_timeout_s: Annotated[float, typer.Option(help="A worker that keeps the others waiting is ended.")] = 1.5,
    replace: Annotated[bool, typer.Option(help="Start a new worker for each that was lost.")] = True,
    attach: Annotated[
        bool, typer.Option("--attach", help="Only a front end, for a deployment that runs in --ray-address.")
    ] = False,
) -> None:
    """Serve a model until Ctrl-C."""
    from moeray.deploy import supervisor

    console = Console()
    try:
        config = ServeConfig(
            model=model,
            workers=workers,
            spares=spares,
            max_workers=max_workers,
            min_workers=min_workers,
            host=host,
            port=port,
            api_key=api_key,
            admin_key=admin_key,
            served_model_name=served_model_name,
            generation_config=generation_config,
            deployment=deployment,
            ray_address=ray_address,
            device=device,
            dtype=dtype,
            weights=weights,
            combine=combine,
            dispatcher=dispatcher,
            model_impl=model_impl,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_gib=kv_cache_gib,
            prefix_caching=prefix_caching,
            max_queue=max_queue,
            threads=threads,
            cpus_per_worker=cpus_per_worker,
            gpus_per_worker=gpus_per_worker,
            start_timeout_s=start_timeout_s,
            drain_timeout_s=drain_timeout_s,
            orphan_timeout_s=orphan_timeout_s,
            recovery_timeout_s=recovery_timeout_s,
            stall_timeout_s=stall_timeout_s,
            replace=replace,
            attach=attach,
        )
        if config.beyond_loopback and config.api_key is None:
            console.print(f"[yellow]Anybody who reaches {host} can use this server: --api-key guards it.[/]")
        supervisor.run(supervisor.make_plan(config), console)
    except (MoerayError, ValueError) as error:
        _fail(error, context)


@app.command()
def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [the checkpoint's]")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus to sample from. [the checkpoint's]")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after the end of the text.")] = False,
) -> None:
    """Continue a text on a running server, as it streams."""
    from moeray.deploy import client

    fields: dict[str, object] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    fields |= {"seed": seed, "stop": stop or None, "ignore_eos": ignore_eos or None}
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        for piece in client.stream(url, prompt, given, api_key=api_key):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
    except (MoerayError, ValueError) as error:
        _fail(error, context)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def status(context: typer.Context, url: Url = DEFAULT_URL, api_key: ApiKey = None, admin_key: AdminKey = None) -> None:
    """Show what a running server serves, and who its workers are."""
    from moeray.deploy import client

    try:
        Console().print(client.status_table(client.status(url, api_key=api_key, admin_key=admin_key)))
    except (MoerayError, ValueError) as error:
        _fail(error, context)


@app.command()
def scale(
    context: typer.Context,
    workers: Annotated[int | None, typer.Argument(metavar="[N]", help="How many workers shall serve.")] = None,
    retire: Annotated[list[int] | None, typer.Option(help="A slot that leaves; may be repeated.")] = None,
    deadline_s: DeadlineS = None,
    follow: Follow = True,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Let a running server have more workers, or fewer, while it serves."""
    from moeray.deploy import scale_command

    def start() -> Mapping[str, Any]:
        return scale_command.start(
            url, workers=workers, retire=retire or (), deadline_s=deadline_s, admin_key=admin_key
        )

    _operate(context, start, follow=follow, url=url, admin_key=admin_key)


@app.command()
def rebalance(
    context: typer.Context,
    deadline_s: DeadlineS = None,
    follow: Follow = True,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Let the workers of a running server exchange experts, so that they have equally much to do."""
    from moeray.deploy import scale_command

    def start() -> Mapping[str, Any]:
        return scale_command.start_rebalance(url, deadline_s=deadline_s, admin_key=admin_key)

    _operate(context, start, follow=follow, url=url, admin_key=admin_key)


def _operate(
    context: typer.Context, start: Callable[[], Mapping[str, Any]], *, follow: bool, url: str, admin_key: str | None
) -> None:
    """Start an operation and show how it goes to its end, or only where it can be followed."""
    from moeray.deploy import scale_command

    console = Console()
    try:
        operation = start()
        if not follow:
            operation_id = operation["operation_id"]
            console.print(f"operation {operation_id}: {url}/operations/{operation_id}", soft_wrap=True)
            return
        with scale_command.ScaleProgress(console) as progress:
            operation = scale_command.follow(url, operation, progress.show, admin_key=admin_key)
    except (MoerayError, ValueError) as error:
        _fail(error, context)
    except KeyboardInterrupt:
        console.print("The operation goes on without us.")
        raise typer.Exit(130) from None
    console.print(scale_command.summary(operation), soft_wrap=True)
    if operation["outcome"] != "done":
        _fail(f"{operation['outcome']}: {operation['reason']}", context)


@app.command()
def version() -> None:
    """Print the version."""
    sys.stdout.write(f"moeray {moeray.__version__}\n")


@cluster_app.command("start")
def cluster_start(
    context: typer.Context,
    head: Annotated[bool, typer.Option("--head", help="Start a new cluster here.")] = False,
    join: Annotated[str | None, typer.Option(help="Join the cluster whose head is at host:port.")] = None,
    port: Annotated[int, typer.Option(help="Port of the head.")] = 6379,
    node_ip: Annotated[str | None, typer.Option(help="Address of this node that the others reach.")] = None,
    num_cpus: Annotated[int | None, typer.Option(help="CPUs to offer. [all]")] = None,
    num_gpus: Annotated[int | None, typer.Option(help="GPUs to offer. [all]")] = None,
    token_file: Annotated[Path | None, typer.Option(help="The token that all nodes share. [~/.ray/auth_token]")] = None,
    name: Annotated[str, typer.Option(help="Tells clusters on one host apart.")] = "moeray",
) -> None:
    """Start Ray on this node: --head for a new cluster, --join ADDR for a further node."""
    from moeray.deploy import cluster

    console = Console(soft_wrap=True)
    try:
        if head == (join is not None):
            raise ValueError("exactly one of --head and --join must be given")
        config = cluster.NodeConfig(
            join=join,
            port=port,
            node_ip=node_ip,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            token_path=token_file,
            name=name,
        )
        token = cluster.start_node(config)
    except (MoerayError, ValueError) as error:
        _fail(error, context)
    if join is not None:
        console.print(f"This node is in the cluster of {join}.")
        return
    address = f"{node_ip or '<this node>'}:{port}"
    console.print(f"Ray runs. Copy {token} to the same place on each further node (scp), then there:")
    console.print(f"  moeray cluster start --join {address}", markup=False)
    console.print("and serve from any node:")
    console.print(f"  moeray serve MODEL --ray-address {address} --device cuda", markup=False)


@cluster_app.command("stop")
def cluster_stop(
    context: typer.Context,
    name: Annotated[str, typer.Option(help="Tells clusters on one host apart.")] = "moeray",
) -> None:
    """End the Ray that `moeray cluster start` started on this node."""
    from moeray.deploy import cluster

    try:
        count = cluster.stop_node(name)
    except ValueError as error:
        _fail(error, context)
    Console().print(f"{count} processes ended." if count else "Nothing runs here under this name.")


def main() -> None:
    """The entry point of the `moeray` command."""
    app()


if __name__ == "__main__":
    main()
