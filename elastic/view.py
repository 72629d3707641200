"""What the controller tells about itself: read-only values for the front end and the command line."""

import msgspec

MEMBER_STATES = ("starting", "loading", "joining", "serving", "dead")


class MemberView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the controller knows it. `rank` is None until it is in an epoch's group."""

    slot: int
    incarnation: int
    rank: int | None
    pid: int | None
    node: str | None
    state: str
    num_experts: int
    endpoint: str | None
    public_key: str | None
    loaded_fraction: float = 0.0


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers agreed on when they were ready."""

    dtype: str
    combine: str
    dispatcher: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_moe_layers: int
    num_experts: int
    num_seats: int
    kv_blocks_per_worker: int
    weights_bytes_per_worker: int
    buffer_bytes_per_worker: int


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """A consistent picture; `version` grows with every change.

    `state` is "starting", "serving", "failed" or "stopping"; `cause` says in one line why it failed.
    `placement[layer][member][seat]` is the logical expert in each seat, -1 for none; members in rank order.
    """

    version: int
    state: str
    cause: str | None
    epoch: int
    members: tuple[MemberView, ...]
    placement: tuple[tuple[tuple[int, ...], ...], ...]
    model: ModelView | None


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end gets when it takes the lease: the newest lease wins.

    The CURVE key pair (Z85) is the one that worker inboxes accept.
    """

    lease: int
    public_key: str
    secret_key: str
