"""What the controller tells about itself: read-only values for the front end and the command line."""

import msgspec

# "leaving" serves the sequences it has and gets no new ones; "spare" has its weights and no rank.
MEMBER_STATES = ("starting", "loading", "joining", "serving", "leaving", "spare", "dead")

# In the order of a good end; "rolled_back" takes the place of what did not come. Only repairs are "halting".
PHASES = (
    "planned",
    "provisioning",
    "halting",
    "connecting",
    "transferring",
    "ready",
    "switched",
    "retired",
    "rolled_back",
)
OUTCOMES = ("done", "rolled_back", "failed")


class MemberView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the controller knows it. `rank` is None unless it is in the current epoch's group."""

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
    """What the workers agreed on when they were ready, and how they got there.

    `seat_bytes` are those of one seat in every MoE layer. `load_s` and `load_peak_bytes_per_worker` (private memory)
    are those of the worst; `not_finite` are tensors with NaNs or infinities.
    """

    dtype: str
    weights: str
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
    seat_bytes: int
    load_s: float
    load_peak_bytes_per_worker: int
    not_finite: tuple[str, ...]


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """A consistent picture; `version` grows with every change.

    `state` is "starting", "serving", "recovering" (too few are left to serve, others start), "failed" or "stopping";
    `cause` says in one line why it does not serve.
    `placement[layer][member][seat]` is the logical expert in each seat, -1 for none; members in rank order.
    """

    version: int
    state: str
    cause: str | None
    epoch: int
    members: tuple[MemberView, ...]
    placement: tuple[tuple[tuple[int, ...], ...], ...]
    model: ModelView | None


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A wish for another size: how many workers, or which slots leave, or both.

    With both, the named slots are among those that leave, and others join if they are too many. A repeated
    `operation_id` gets the first operation's result; None lets the controller make one up. `deadline_s` counts until
    the switch.
    """

    workers: int | None = None
    retire: tuple[int, ...] = ()
    operation_id: str | None = None
    deadline_s: float | None = None


class RebalanceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A wish for experts to be exchanged between the members, by the load that these have counted.

    `operation_id` and `deadline_s` are those of `ScaleRequest`.
    """

    operation_id: str | None = None
    deadline_s: float | None = None


class PhaseView(msgspec.Struct, frozen=True, kw_only=True):
    """A phase that an operation reached. `started_at` is in Unix seconds; `seconds` is None while it lasts."""

    name: str
    started_at: float
    seconds: float | None


class OperationView(msgspec.Struct, frozen=True, kw_only=True):
    """One change of membership or placement, running or over. `outcome` is None while it runs, then one of `OUTCOMES`.

    `phase` is the last one reached. `to_epoch` is `from_epoch` if there was nothing to do, else a number that no other
    operation has, also after a rollback. `targets` are the slots of the next epoch, `joiners` those that it adds,
    `leavers` those that it ends. `moved_experts` (seats to fill) is known with the plan, `moved_bytes` and `kv_blocks`
    (copied for running sequences of leavers) once they moved.
    """

    operation_id: str
    kind: str
    requested: dict[str, int | tuple[int, ...]]
    phase: str
    outcome: str | None
    reason: str | None
    from_epoch: int
    to_epoch: int
    phases: tuple[PhaseView, ...]
    deadline_s: float
    targets: tuple[int, ...]
    joiners: tuple[int, ...]
    leavers: tuple[int, ...]
    moved_experts: int = 0
    moved_bytes: int = 0
    kv_blocks: int = 0

    def started_at(self, phase: str) -> float | None:
        """When the phase was reached, in Unix seconds; None if it never was."""
        return next((view.started_at for view in self.phases if view.name == phase), None)


class FaultView(msgspec.Struct, frozen=True, kw_only=True):
    """A member of the group that was lost, or whose group was. Times are Unix seconds.

    `kind` says how: it died, was silent, stalled, or lost its group. `recovered_s` is how long it took until the group
    served again, as epoch `to_epoch`; None while it does not.
    """

    fault_id: int
    slot: int
    incarnation: int
    kind: str
    cause: str
    epoch: int
    at: float
    recovered_s: float | None
    to_epoch: int | None


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end gets when it takes the lease: the newest lease wins.

    The CURVE key pair (Z85) is the one that worker inboxes accept.
    """

    lease: int
    public_key: str
    secret_key: str
