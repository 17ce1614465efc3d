"""A plan as lines for the console."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from holmesjax.layer_specs.model_layers import EMBED, HEAD
from holmesjax.plan.mailbox_cost import MailboxCost
from holmesjax.plan.plan import Axis, Plan, StagePlan
from holmesjax.topology.description import each_way
from holmesjax.topology.fabrics import NETWORKS
from holmesjax.units import counted, show

IDLE_SHOWN = 4  # nodes by name
DEPTHS_SHOWN = 16  # stages
PARTS_SHOWN = 2  # of a device's memory, beside the rest


def describe(
    plan: Plan, kind_of: Mapping[str, str] | None = None, *, is_pinned: bool = False
) -> list[str]:
    """The plan for the console: four lines for each stage, and a few for the whole.

    Args:
      plan: any.
      kind_of: the kind of each Transformer layer by its name, where a model has several kinds.
      is_pinned: whether the run sets a part of it, and so which plans were compared (`pins`).
    """
    if plan.islands:
        return _describe_islands(plan, kind_of, is_pinned)
    num_devices = sum(len(stage.devices) for stage in plan.stages)
    sequences = plan.global_batch // plan.microbatches
    shares = ", ".join(f"{name} {share:.1%}" for name, share in plan.shares.items())
    lines = [
        f"plan {plan.hash()}: {counted(plan.num_layers, 'layer')} in "
        f"{counted(len(plan.stages), 'stage')} on {counted(num_devices, 'device')} "
        f"of topology {plan.topology}"
    ]
    cluster_width = max(len(stage.cluster) for stage in plan.stages)
    nodes_width = max(len(_nodes(stage.nodes)) for stage in plan.stages)
    for i, stage in enumerate(plan.stages):
        place = f"{stage.cluster:{cluster_width}}  {_nodes(stage.nodes):{nodes_width}}"
        lines += [f"  stage {i:<3} {place}  {layers_text(stage, kind_of or {})}", *_details(stage)]
    if plan.idle:
        idle = [f"{node} {num_devices}" for node, num_devices in plan.idle.items()]
        if len(idle) > IDLE_SHOWN:
            idle = [f"{sum(plan.idle.values())} on {len(plan.idle)} nodes"]
        lines.append(f"  idle      devices: {', '.join(idle)}")
        lines += [f"            {name}: {why}" for name, why in plan.idle_because.items()]
    boundary = f", {show(plan.boundary_bytes, 'B')} each way between stages"
    lines.append(
        f"  schedule  {plan.schedule}, {counted(plan.microbatches, 'microbatch', 'es')} of "
        f"{counted(sequences, 'sequence')}{boundary if len(plan.stages) > 1 else ''}"
    )
    if plan.in_flight:
        depths = ", ".join(map(str, plan.in_flight))
        if len(plan.in_flight) > DEPTHS_SHOWN:
            depths = f"from {plan.in_flight[0]} on the first to {plan.in_flight[-1]} on the last"
        lines.append(f"            in flight on the stages: {depths}")
    if plan.recomputed_layers:
        numbers = ", ".join(map(str, plan.recomputed_layers))
        if len(plan.recomputed_layers) > DEPTHS_SHOWN:
            numbers = f"{min(plan.recomputed_layers)} to {max(plan.recomputed_layers)}"
        lines.append(
            f"            layers that compute again ({plan.activation_checkpointing}), the first "
            f"of each stage: {numbers}"
        )
    if plan.pipes:
        queued = {queue.pipe for queue in plan.queues}
        waits = lambda name: ", where boundaries wait for each other," * (name in queued)
        texts = {name: f"{share:.0%}{waits(name)}" for name, share in plan.pipes.items()}
        shares_of = each_way(texts)
        lines.append(f"  pipes     share of the capacity in use: {', '.join(shares_of)}")
    return [
        *lines,
        f"  step      {show(plan.step_time_s, 's')} predicted: {shares}",
        f"            {_proof(plan, is_pinned)}",
        *_tensor_over_network(plan),
        *([f"  exception {plan.exception}"] if plan.exception else []),
    ]


def _describe_islands(plan: Plan, kind_of: Mapping[str, str] | None, is_pinned: bool) -> list[str]:
    assert plan.meeting is not None, "islands have a meeting"
    if plan.meeting.mailbox:
        return _describe_apart(plan, plan.meeting.mailbox, kind_of, is_pinned)
    meeting, texts = plan.meeting, [show(sent, "B") for sent in plan.meeting.bytes]
    exposed_s = meeting.exposed_s / meeting.every
    waits = f"and all wait {show(meeting.exposed_s, 's')}"
    if meeting.delay:
        late = f"{show(meeting.hidden_s, 's')} are hidden behind {counted(meeting.delay, 'step')}"
        waits = f"{late}, {waits}"
    if meeting.fragments > 1:
        texts[-1] += f" in {meeting.fragments} fragments"
    if meeting.codec != "float32":
        texts[-1] += f" as {meeting.codec}"
    if meeting.rule != "nesterov":
        texts[-1] += f" by the rule {meeting.rule}"
    pairs = ["  pairs     random ones meet, and none of more than two"]
    if len(plan.islands) % 2:
        pairs[0] += "; one island sits out each meeting, and sends nothing in it"
    lines = [
        f"plan {plan.hash()}: {counted(len(plan.islands), 'island')}, which train on their own and "
        f"meet every {counted(meeting.every, 'step')}, on topology {plan.topology}",
        f"  meeting   islands send {', '.join(texts)}, {waits}",
        *(pairs if meeting.rule == "noloco" else ()),
        *(f"  shares    {words}, and weigh so much" for words in unlike_shares(plan)),
        f"  step      {show(plan.step_time_s, 's')} predicted: {show(exposed_s, 's')} of it "
        "for the meeting, the rest in the slowest island",
    ]
    for number, island in enumerate(plan.islands):
        own = describe(island, kind_of, is_pinned=is_pinned)
        lines += [f"  island {number}, {own[0]}", *(f"  {line}" for line in own[1:])]
    return lines


def unlike_shares(plan: Plan) -> list[str]:
    """The words about the parts of the batch that islands take; none where these are equal."""
    if len(set(plan.batch_shares)) < 2:
        return []
    parts = ", ".join(f"{island.global_batch:,}" for island in plan.islands)
    return [f"islands take {parts} of {counted(plan.global_batch, 'sequence', form=',')}"]


def _describe_apart(
    plan: Plan, cost: MailboxCost, kind_of: Mapping[str, str] | None, is_pinned: bool
) -> list[str]:
    """The lines of islands that meet through a mailbox, all of them or one."""
    assert plan.meeting is not None, "islands have a meeting"
    count = len(plan.islands)
    who = "an island," if count == 1 else f"{count} islands, each"
    lines = [
        f"plan {plan.hash()}: {who} a job of its own, which sends to a mailbox every "
        f"{counted(plan.meeting.every, 'step')}, on topology {plan.topology}",
        f"  mailbox   in a round each sends {show(cost.sent, 'B')} and receives "
        f"{show(cost.received, 'B')} in {counted(cost.requests, 'request')}, while steps go on",
        f"            who merges sends {show(cost.merge_sent, 'B')} more, and receives "
        f"{show(cost.merge_received, 'B')} in {counted(cost.merge_requests, 'request')}",
    ]
    for number, island in enumerate(plan.islands):
        own = describe(island, kind_of, is_pinned=is_pinned)
        name = f"island {number}, " if count > 1 else ""
        lines += [f"  {name}{own[0]}", *(f"  {line}" for line in own[1:])]
    return lines


def _tensor_over_network(plan: Plan) -> list[str]:
    """The line about stages whose `tensor` leaves its node, if there are any."""
    over = {
        i: fabric
        for i, stage in enumerate(plan.stages)
        if stage.mesh.get(Axis.TENSOR, 1) > 1
        and (fabric := stage.fabrics.get(Axis.TENSOR)) in NETWORKS
    }
    if not over:
        return []
    names = ", ".join(f"stage {i} ({fabric})" for i, fabric in over.items())
    slowest_s = max(plan.stages[i].seconds.get("tensor", 0.0) for i in over)
    return [
        f"  tensor    leaves the node in {names}: up to {show(slowest_s, 's')} of a step, "
        "and no faster plan",
        "            was found that keeps it inside nodes",
    ]


def _proof(plan: Plan, is_pinned: bool) -> str:
    """The bound on plans that could be faster."""
    gap, which = 1.0 - plan.bound_s / plan.step_time_s, "no plan"
    if plan.recomputed_layers:
        which += " whose layers all compute again, or none,"
    if is_pinned:
        which += " with the pinned settings"
    if gap <= 0.0:
        return f"{which} is faster: all that could be were tried"
    return f"{which} takes less than {show(plan.bound_s, 's')}, {gap:.0%} below"


def _details(stage: StagePlan) -> list[str]:
    """Mesh, memory and time of a stage."""
    axes = [f"{axis} {size} ({stage.fabrics[axis]})" for axis, size in stage.mesh.items()]
    cut = ", tensor also cuts sequences between products" * stage.sequence_parallel
    if stage.expert_chunks > 1:
        cut += f", tokens exchanged in {stage.expert_chunks} chunks"
    parts = sorted(stage.memory_bytes.items(), key=lambda item: -item[1])
    if len(parts) > PARTS_SHOWN + 1:
        rest = sum(num_bytes for _, num_bytes in parts[PARTS_SHOWN:])
        parts[PARTS_SHOWN:] = [("the rest", rest)]
    shown = ", ".join(f"{name} {show(num_bytes, 'B')}" for name, num_bytes in parts)
    total = show(sum(stage.memory_bytes.values()), "B")
    seconds = ", ".join(f"{name} {show(s, 's')}" for name, s in stage.seconds.items())
    if stage.logit_bytes is not None:
        cut += f", {show(stage.logit_bytes, 'B')} of logits at a time"
    details = {
        "mesh": " x ".join(axes) + cut,
        "memory": f"{total} a device: {shown}",
        "time": seconds,
    }
    return [f"            {name:6}  {text}" for name, text in details.items()]


def _nodes(nodes: Sequence[str]) -> str:
    return ", ".join(nodes) if len(nodes) < 4 else f"{nodes[0]} to {nodes[-1]}, {len(nodes)} nodes"


def layers_text(stage: StagePlan, kind_of: Mapping[str, str]) -> str:
    """The layers that the stage holds, as text.

    >>> stage = StagePlan(cluster="ib", nodes=("ib-0",), devices=(0,), mesh={Axis.DATA: 1},
    ...                   chunks=(("block_001",), ("block_003", "head")),
    ...                   fabrics={}, memory_bytes={}, seconds={})
    >>> layers_text(stage, {})
    '2 layers + head in 2 chunks'
    >>> layers_text(stage, {"block_001": "block", "block_003": "window_block"})
    '2 layers (1 block, 1 window_block) + head in 2 chunks'
    """
    embed = [EMBED] if EMBED in stage.layers else []
    head = [HEAD] if HEAD in stage.layers else []
    chunks = f" in {len(stage.chunks)} chunks" if len(stage.chunks) > 1 else ""
    blocks = counted(stage.num_blocks, "layer")
    if kind_of:
        blocks += f" ({of_kinds(kind_of[name] for name in stage.layers if name in kind_of)})"
    return " + ".join([*embed, blocks, *head]) + chunks


def of_kinds(kinds: Iterable[str]) -> str:
    """How many layers of each kind there are.

    >>> of_kinds(["block", "window_block", "block"])
    '2 block, 1 window_block'
    """
    return ", ".join(f"{number} {kind}" for kind, number in Counter(kinds).items())
