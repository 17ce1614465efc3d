"""A stage's domain: the `jax.distributed` job of its processes and no one else's, and its NICs.

The coordinator lives in the process of rank 0. Its port is held from the moment in which others are
told of it: JAX 0.10.2 ends the process with a segmentation fault where it is taken.
"""

import inspect
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import jax
import yaml
from jax._src import distributed  # JAX has no public way to its key-value store

from holmesjax.config import DistributedConfig
from holmesjax.errors import HolmesError
from holmesjax.files.whole_files import write_whole
from holmesjax.hosts import nccl
from holmesjax.hosts.nics import Host
from holmesjax.job import Job
from holmesjax.plan.processes import Process, domain_fabric
from holmesjax.transport import addresses as places, connections, tls

# JAX aborts the processes of a domain when one of them is lost. Ours must notice first, because its
# message says what happened.
PATIENCE = 2.0
SLICE_S = 5.0  # of waiting at a gate, after which a process can hear a signal
CAME, OPEN = "/came", "/open"  # the keys of a gate: how many have come, and why the others may go
ALL_CAME, FAILED = "all came", "failed"  # why
DOMAIN_URI = "holmesjax://domain/"  # in certificates: JAX compares no addresses where there is one
_kept: list[tls.SecretFile] = []
NICS = "nics"  # a folder in the run folder: for each process, which NICs it uses and why


def device_kinds(job: Job, domain: Sequence[Process]) -> set[str]:
    """The devices that its processes compute on."""
    if job.config.run.rehearse:
        return {"cpu"}
    return {job.topology.node(process.node).device.name for process in domain}


def choose_nics(
    job: Job,
    domain: Sequence[Process],
    me: Process,
    addresses: Mapping[str, Sequence[str]],
    env: MutableMapping[str, str],
    find_host: Callable[[], Host],
) -> list[str]:
    """Tells NCCL which NICs to use, before the first collective. Returns warnings.

    Nothing is needed on one node, nor where the launcher `local` plays several on one machine.

    Args:
      domain: all processes of the stage.
      me: this one.
      addresses: of this node, by fabric.
      env: of this process; NCCL's variables are added to it, those it has stay.
      find_host: asked for this host's NICs if they matter.

    Raises:
      HolmesError: the host has no usable NIC on the fabric of the domain.
    """
    fabric = domain_fabric(job.topology, domain)
    here = addresses.get(fabric, ())
    is_one_machine = any(places.is_loopback(address) for address in here)
    is_one_node = len({process.node for process in domain}) == 1
    if is_one_node or is_one_machine or device_kinds(job, domain) == {"cpu"}:
        return []
    host = find_host()
    found = nccl.environment(host, fabric, here, nccl.user_settings(env))
    env.update(found.added)
    folder = job.run_dir / NICS
    folder.mkdir(exist_ok=True)
    text = yaml.safe_dump(nccl.report(host, found), sort_keys=False, width=1000)
    write_whole(folder / f"{me.file_name}.yaml", text)
    return found.warnings


def hold_coordinator_port(address: str, config: DistributedConfig, stage: int) -> socket.socket:
    """Holds a port for the coordinator of a stage, of the config or any that is free.

    The socket that is returned is bound and does not listen. Until it is closed, only this user's
    sockets with SO_REUSEPORT can take its port, and JAX's coordinator is one.

    Raises HolmesError if the configured port is taken.
    """
    port = config.port + stage if config.port else 0
    sock = None
    try:
        family, place = next(places.resolve(address, port))
        sock = socket.socket(family, socket.SOCK_STREAM)
        if port:  # as the coordinator does: the connections of an earlier one may linger
            connections.listen(address, port).close()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        # It was for the connections of before; another job that also sets it could bind here, too.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except (HolmesError, OSError) as error:
        if sock is not None:
            sock.close()
        raise HolmesError(
            f"distributed.port, {places.show(address, port)}",
            f"the coordinator of stage {stage} cannot listen there",
            found=error.found if isinstance(error, HolmesError) else error.strerror,
            fix="choose another distributed.port, or 0 for any that is free",
        ) from None
    # Behind `bind`: with it, two jobs of a user could hold one port.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return sock


def join(
    process: Process,
    domain: tuple[Process, ...],
    coordinator: tuple[str, int] | None,
    config: DistributedConfig,
    key: bytes,
) -> dict[int, jax.Device]:
    """Joins the domain; its devices, by their numbers in the topology. Waits for all to come.

    From JAX 0.12 on, the coordinator and its clients authenticate each other with mutual TLS.

    Args:
      process: this one.
      domain: all processes of the stage, in the order of their ranks.
      coordinator: address and port of rank 0; not needed by a process that is alone.
      key: of the job.
    """
    if len(domain) > 1:
        assert coordinator is not None, "rank 0 tells where it listens"
        address = places.show(*coordinator)
        # JAX would swallow SIGTERM and go on.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            address,
            num_processes=len(domain),
            process_id=process.rank,
            cluster_detection_method="deactivate",
            initialization_timeout=int(config.start_timeout_s),
            heartbeat_timeout_seconds=int(PATIENCE * config.heartbeat_timeout_s + 1),
            coordinator_bind_address=address,
            **_secure_coordinator(key),
        )
    found: dict[int, jax.Device] = {}
    for other in domain:
        devices = [d for d in jax.devices() if d.process_index == other.rank]
        if len(devices) != len(other.devices):
            raise HolmesError(
                f"{other.name}",
                "the process does not see the devices that the topology gives it",
                found=f"{len(devices)} {jax.default_backend()} devices, the plan needs "
                f"{len(other.devices)}",
                fix="correct the topology, set CUDA_VISIBLE_DEVICES of the process to its devices "
                f"{', '.join(map(str, other.local_devices))} of the node, or set run.rehearse=true",
            )
        found |= zip(other.devices, devices, strict=True)
    return found


def _secure_coordinator(key: bytes) -> dict[str, Any]:
    """Arguments of `jax.distributed.initialize` for mutual TLS; none before JAX 0.12.

    JAX reads the files again and again, so they stay until this process ends.
    """
    if "mtls_cert_file" not in inspect.signature(jax.distributed.initialize).parameters:
        return {}
    authority = tls.authority(key)
    own = authority.issue(uri=DOMAIN_URI, valid=tls.ALWAYS)
    _kept.extend([tls.SecretFile(own), tls.SecretFile(authority.pem)])
    [own_path, trusted_path] = [file.path for file in _kept[-2:]]
    return {
        "mtls_cert_file": own_path,
        "mtls_key_file": own_path,
        "mtls_ca_file": trusted_path,
        "mtls_peer_uri_prefix": DOMAIN_URI,
    }


class Gate:
    """The domain's processes wait for each other here until one of them says it has failed.

    JAX's own barrier would wait for the failed process until its deadline. Whoever comes adds one
    to a counter, and the last opens the gate: the others wait for that key in the server. So a
    gate costs each process a few messages, however long it waits. A gate serves one save after
    another: when a process begins one, all have left the one before the last.

    Args:
      name: of the gate's keys.
      client: of the domain's key-value store.
      process: number of this process in the domain.
      num_processes: that wait for each other.
    """

    def __init__(self, name: str, client: Any, process: int, num_processes: int):
        self._name, self._client = name, client
        self._process, self._num_processes = process, num_processes
        self._round = 0

    def begin(self) -> None:
        """Begins the next thing, in which nobody has failed yet."""
        self._round += 1
        if self._process == 0:
            self._client.key_value_delete(self._key(self._round - 2))

    def fail(self) -> None:
        """Sends all away who wait now, or come later for the same thing."""
        # The flag first: who comes meanwhile looks for it after the counter of its key is there.
        self._client.key_value_set(self._flag, "", allow_overwrite=True)
        for name, _ in self._client.key_value_dir_get(self._key(self._round)):
            if name.endswith(CAME):
                self._open(name.removesuffix(CAME), FAILED)

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Returns when all have come to the same key; as Orbax calls its barriers.

        Raises OSError when one has failed, and TimeoutError.
        """
        deadline_s = time.monotonic() + timeout_ms / 1000
        here = self._key(self._round) + key
        num_here = self._client.key_value_increment(here + CAME, 1)
        if num_here == self._num_processes:
            self._open(here, ALL_CAME)
        elif self.has_failed():
            self._open(here, FAILED)
        while (left_s := deadline_s - time.monotonic()) > 0:
            wait_ms = 1 + int(1000 * min(left_s, SLICE_S))
            try:
                verdict = self._client.blocking_key_value_get(here + OPEN, wait_ms)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                continue
            if verdict == FAILED:
                raise OSError("another process of the stage has failed in it")
            return
        raise TimeoutError(f"not all processes of the stage came within {timeout_ms} ms")

    def _open(self, here: str, verdict: str) -> None:
        """Lets all go who wait at a key, with the first verdict about it."""
        try:
            self._client.key_value_set(here + OPEN, verdict)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise

    def has_failed(self) -> bool:
        """Whether one has failed in the thing that was begun last."""
        try:
            self._client.key_value_try_get(self._flag)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return False
        return True

    @property
    def _flag(self) -> str:
        return self._key(self._round) + FAILED

    def _key(self, number: int) -> str:
        return f"{self._name}/{number}/"


def gate(name: str) -> Gate | None:
    """Returns a gate for the processes of this domain; None: this one has nobody to wait for."""
    if jax.process_count() == 1:
        return None
    return Gate(name, distributed.global_state.client, jax.process_index(), jax.process_count())
