"""Two sites with nothing in common but a slow link: one refuses calls, and all is killed again and
again. The losses are those of a run that nobody has disturbed, to the bit. Where a site goes on
alone for a while, its plan has one stage and other programs, and the losses are the same but for
rounding.

Site b is behind a router that translates its addresses, where `nft` is there; else behind a
firewall alone."""

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time

import pytest

from holmesjax.checkpoints import manifest
from holmesjax.report import metrics
from tests.jobs import ROOT, compiling_as_here, run_launch, write_run
from tests.labs import needs_lab

CLUSTERS = {"a": (1,), "b": (1,)}
ADDRESSES = {"a": "10.9.1.1", "b": "10.9.1.2"}  # on the link, as the other site sees them
BEHIND = "10.9.2.2"  # of site b, behind its router
NFT = shutil.which("nft")
LISTEN = "10.9.1.1:7000"
KILLS = 20
STEPS_EACH = 8  # more than a start takes between its checkpoint and its end
SETTINGS = [
    "model.num_layers=2",
    "model.width=16",
    f"train.steps={STEPS_EACH * KILLS}",
    "checkpoint.every=2",
    "distributed.calls_out=[b]",
]
HANG_S = 300
ROUNDING = 1e-6  # of losses: after 160 steps they were apart by 2e-7
RATE = "20mbit burst 20kb latency 100ms"
# A first packet of a connection, SYN without ACK, does not get into site b.
NO_CALLS = "u32 match ip protocol 6 0xff match u8 0x02 0x12 at nexthdr+13"
NO_CALLS += " action mirred egress redirect dev void"


class Sites:
    """Two network namespaces with a shaped link between them, and what runs in them."""

    def __init__(self, folder, stack):
        self.folder, self.lab, self._stack = folder, f"holmes-t{secrets.token_hex(2)}", stack
        self.children = []
        for name in CLUSTERS:
            (folder / f"site_{name}").mkdir()
            gone = ["ip", "netns", "del", self.lab + name]
            stack.callback(subprocess.run, gone, check=False, capture_output=True)
        stack.callback(self.kill)
        script = "\n".join(self.with_router() if NFT else self.with_firewall())
        subprocess.run(["sh", "-ec", script], check=True)

    def linked(self, there):
        """Lines that join site a and the namespace in which the link ends for site b."""
        a = self.lab + "a"
        lines = [f"ip netns add {a}", f"ip netns add {self.lab}b"]
        lines += [f"ip netns add {there}"] * (there != f"{self.lab}b")
        lines += [f"ip -n {a} link add wan type veth peer name wan netns {there}"]
        for space, address in zip((a, there), ADDRESSES.values(), strict=True):
            lines += [
                f"ip -n {space} addr add {address}/24 dev wan",
                f"ip -n {space} link set wan up",
                f"ip -n {space} link set lo up",
                f"tc -n {space} qdisc add dev wan root tbf rate {RATE}",
            ]
        return lines

    def with_firewall(self):
        b = self.lab + "b"
        return [
            *self.linked(b),
            f"ip -n {b} link add void type veth peer name nowhere",
            f"ip -n {b} link set void up",
            f"ip -n {b} link set nowhere up",
            f"tc -n {b} qdisc add dev wan ingress",
            f"tc -n {b} filter add dev wan parent ffff: protocol ip {NO_CALLS}",
        ]

    def with_router(self):
        """The router gives what leaves site b its own address, and drops calls from outside."""
        b, router = self.lab + "b", self.lab + "r"
        gone = ["ip", "netns", "del", router]
        self._stack.callback(subprocess.run, gone, check=False, capture_output=True)
        rules = [
            "add table ip nat",
            "add chain ip nat out { type nat hook postrouting priority 100; }",
            "add rule ip nat out oifname wan masquerade",
            "add chain ip nat in { type filter hook input priority 0; }",
            "add rule ip nat in iifname wan ct state new drop",
        ]
        inside = f"ip netns exec {router}"
        return [
            *self.linked(router),
            f"ip -n {router} link add lan type veth peer name lan netns {b}",
            f"ip -n {router} addr add 10.9.2.1/24 dev lan",
            f"ip -n {router} link set lan up",
            f"ip -n {b} addr add {BEHIND}/24 dev lan",
            f"ip -n {b} link set lan up",
            f"ip -n {b} link set lo up",
            f"ip -n {b} route add default via 10.9.2.1",
            f"{inside} sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'",
            *(f"{inside} {NFT} '{rule}'" for rule in rules),
        ]

    def start(self, site, words, name, **env):
        """Starts a verb at a site, which does not see the folder of the other site."""
        [other] = CLUSTERS.keys() - {site}
        hide = f'mount -t tmpfs none {self.folder / f"site_{other}"} && exec "$@"'
        with (self.folder / f"{name}.out").open("a") as output:
            child = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self.lab + site, "unshare", "--mount"),
                    *("sh", "-c", hide, "sh", sys.executable, "-m", "launch", *map(str, words)),
                ],
                cwd=ROOT,
                env={**os.environ, **compiling_as_here(), "PYTHONPATH": str(ROOT), **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.children.append(child)
        return child

    def answer(self, site, other):
        """The exception with which a call from a site to a port of the other ends."""
        call = f"import socket; socket.create_connection(('{ADDRESSES[other]}', 9), 2)"
        words = ["ip", "netns", "exec", self.lab + site, sys.executable, "-c", call]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.stderr.strip().splitlines()[-1].partition(":")[0]

    def kill(self):
        """Kills everything at once, as a loss of power would."""
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        for child in self.children:
            child.wait(30)
        self.children.clear()

    def begin(self, run_file, *words):
        """Starts the launcher and, once there is a key, a process of each site."""
        home = self.folder / "site_a/run"
        key_file = home / "job.key"
        old = key_file.read_bytes() if key_file.exists() else b""
        words = ["train", run_file, "--launcher", "external", "--listen", LISTEN, *words]
        launcher = self.start("a", words, "launcher")
        deadline_s = time.monotonic() + HANG_S
        while not key_file.exists() or key_file.read_bytes() in (b"", old):
            assert launcher.poll() is None, self.output()
            assert time.monotonic() < deadline_s, self.output()
            time.sleep(0.02)
        key = key_file.read_text()
        of_all = {"HOLMES_CONTROLLER": LISTEN, "HOLMES_KEY": key}
        own_addresses = ADDRESSES | ({"b": BEHIND} if NFT else {})
        for number, (site, address) in enumerate(own_addresses.items()):
            verb, own = "worker", {"HOLMES_PROCESS": str(number)}
            own["HOLMES_ADDRESSES"] = json.dumps({"ethernet": [address]})
            if site == "b" and "parallel.clusters=[a]" in words:
                verb, own = "store", {"HOLMES_NODE": "b-0"}  # it has what it has written
            self.start(site, [verb, self.folder / f"site_{site}/run"], site, **of_all, **own)
        return launcher

    def output(self):
        return "".join(path.read_text()[-4000:] for path in sorted(self.folder.glob("*.out")))


def newest(home):
    return max(dict(manifest.finished(home)), default=0)


@needs_lab
@pytest.mark.exhaustive
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("goes_alone", [False, True])
def test_two_sites_that_are_killed_again_and_again_lose_nothing(tmp_path, goes_alone, capfd):
    moments = random.Random(0)
    run_file = write_run(tmp_path, CLUSTERS)
    done = run_launch("train", run_file, *SETTINGS, f"run.dir={tmp_path / 'undisturbed'}")
    assert done.returncode == 0, done.stderr
    home = tmp_path / "site_a/run"
    settings = [*SETTINGS, f"run.dir={home}"]
    of_alone = []  # the checkpoints from which a site went on alone
    with contextlib.ExitStack() as stack:
        sites = Sites(tmp_path, stack)
        assert sites.answer("a", "b") == "TimeoutError"
        assert sites.answer("b", "a") == "ConnectionRefusedError"  # it gets there
        for number in range(KILLS):
            one_alone = ["parallel.clusters=[a]"] if goes_alone and number % 3 == 2 else []
            if one_alone:
                of_alone.append(newest(home))
            sites.begin(run_file, *settings, *one_alone)
            # Every fourth time while it starts; otherwise soon after a new checkpoint.
            wanted = newest(home) + 2 if number % 4 != 3 else 10**9
            deadline_s = time.monotonic() + (HANG_S if wanted < 10**9 else moments.uniform(0, 8))
            while newest(home) < wanted and time.monotonic() < deadline_s:
                assert all(child.poll() is None for child in sites.children), sites.output()
                time.sleep(0.005)
            assert wanted == 10**9 or newest(home) >= wanted, sites.output()
            time.sleep(moments.uniform(0, 0.3))
            sites.kill()
            said = f"kill {number + 1}, {'site a alone' if one_alone else 'both sites'}"
            with capfd.disabled():
                print(f"\n{said}: the newest checkpoint is {newest(home)}", end="")
        launcher = sites.begin(run_file, *settings)
        assert launcher.wait(HANG_S) == 0, sites.output()
    losses = [
        {record["step"]: record["loss"] for record in metrics.read(folder)}
        for folder in (home, tmp_path / "undisturbed")
    ]
    first_alone = 1 + (of_alone[0] if of_alone else STEPS_EACH * KILLS)
    assert all(losses[0][step] == losses[1][step] for step in range(1, first_alone))
    assert losses[0] == pytest.approx(losses[1], rel=ROUNDING)
    assert len(losses[0]) == STEPS_EACH * KILLS
    assert not (tmp_path / "site_b/run/metrics.jsonl").exists()
