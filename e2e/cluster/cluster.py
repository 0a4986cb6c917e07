"""Brings the cluster up, tells how it is, and gives access to it."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from . import (
    addons,
    addressing,
    containerd,
    control_plane,
    credentials,
    debian,
    fabric,
    image_set,
    nodes,
    shares,
    state,
    teardown,
)
from . import tools as tools_module
from .addressing import NodeAddresses
from .errors import ClusterError
from .kube import ApiError, KubeClient, wait_for
from .paths import Layout
from .processes import Processes
from .state import Settings
from .tools import Tools

Say = Callable[[str], None]
_AGAIN = "run `python3 -m e2e.cluster down`, then `up` again"


@dataclass(frozen=True)
class Health:
    """What a cluster lacks to be of use; all empty when it's well."""

    dead: list[str] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)

    @property
    def well(self) -> bool:
        return not self.dead and not self.trouble


class Cluster:
    """One embedded cluster, found by its state folder."""

    def __init__(self, layout: Layout, say: Say) -> None:
        self.layout = layout
        self.processes = Processes(layout)
        self._say = say

    def up(self, count: int) -> None:
        """Brings the cluster up, or mends it; does nothing where it is well."""
        wanted = addressing.nodes(count)
        self.layout.check()
        debian.check_host()
        with state.locked(self.layout):
            if self._keep(count):
                return
            debian.ensure_packages(self._say)
            tools = tools_module.ensure_tools(self._say)
            self.layout.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            settings = state.load(self.layout) or Settings(count, fabric.free_port(), tools.key)
            settings.save(self.layout)
            self._start(wanted, settings, tools)
            self.layout.started.touch()

    def _keep(self, count: int) -> bool:
        """Whether what is there is well; takes it away where it can't be mended."""
        if not self.layout.root.exists():
            return False
        settings = state.load(self.layout)
        if settings is None or not self.layout.started.exists():
            self._say("a start was cut short: taking its remains away")
            teardown.down(self.layout)
            return False
        health = self.health(settings)
        # All the rest depends on these two; anything else can be started again by itself.
        lost = [name for name in (fabric.PROCESS, control_plane.ETCD) if name in health.dead]
        if lost:
            self._say(f"the cluster is half up ({', '.join(lost)} ended): starting anew")
            teardown.down(self.layout)
            return False
        if settings.nodes != count:
            raise ClusterError(f"the cluster is up with {settings.nodes} nodes, not {count}", hint=_AGAIN)
        if settings.tools != tools_module.ensure_tools(self._say, ()).key:
            raise ClusterError("the cluster runs other versions of its programs than e2e/tools pins", hint=_AGAIN)
        if not health.well:
            self._say(f"mending the cluster: {', '.join(health.dead + health.trouble)}")
        return health.well

    def _start(self, every: Sequence[NodeAddresses], settings: Settings, tools: Tools) -> None:
        layout, processes = self.layout, self.processes
        credentials.ensure(layout, every, settings.port)
        fabric.ensure(layout, processes)
        fabric.ensure_relay(layout, processes, settings.port)
        born = [node for node in every if nodes.start_namespaces(layout, processes, node, every)]
        # The nodes' container runtimes and the control plane don't wait for each other.
        with ThreadPoolExecutor() as pool:
            prepared = pool.submit(self._prepare_nodes, born, every, tools)
            control_plane.start(layout, processes, tools)
            prepared.result()
        for node in every:
            nodes.start_kubelet(layout, processes, tools, node)
        client = KubeClient(layout.kubeconfig)
        addons.apply_dns(layout, tools)
        names = [node.name for node in every]
        wait_for(
            "the nodes to register and be Ready",
            lambda: addons.nodes_ready(client, every),
            timeout=180,
            log=layout.log(f"kubelet-{names[0]}"),
            hint=f"see also the other kubelets' logs in {layout.logs}; {_AGAIN}",
            alive=lambda: all(processes.alive(f"kubelet-{name}") for name in names),
        )
        nodes.start_kube_proxies(layout, processes, tools, every)
        addons.describe_nodes(client, every)
        wait_for(
            "the cluster's DNS",
            lambda: addons.dns_available(client),
            timeout=180,
            log=layout.log(f"kubelet-{names[0]}"),
            hint="`python3 -m e2e.cluster kubectl -n kube-system describe pods` says more",
        )

    def _prepare_nodes(self, born: Sequence[NodeAddresses], every: Sequence[NodeAddresses], tools: Tools) -> None:
        for node in born:
            nodes.connect(self.layout, self.processes, node)
            self._share([node.name])
        base = [image_set.pause_image(tools), image_set.dns_image(tools)]
        image_set.load(self.layout, [node.name for node in every], [*base, image_set.busybox_image()])

    def _share(self, names: Sequence[str]) -> None:
        for name in names:
            pid = nodes.init_pid(self.processes, name)
            present = [folder for folder in shares.remembered(self.layout) if folder.is_dir()]
            shares.ensure_shared(self.layout, name, pid, present)

    def stop(self, name: str) -> None:
        """Kills one of the cluster's processes, for tests of what happens then; `up` mends it."""
        known = self.expected_processes(self.settings())
        if name not in known:
            raise ClusterError(f"no process is called {name}", hint=f"one of {', '.join(known)}")
        nodes.kill_program(self.processes, name)

    def down(self) -> None:
        debian.check_host()
        with state.locked(self.layout):
            teardown.down(self.layout)

    def settings(self) -> Settings:
        settings = state.load(self.layout)
        if settings is None:
            raise ClusterError("the cluster isn't up", hint="bring it up: `python3 -m e2e.cluster up`")
        return settings

    def nodes(self) -> list[NodeAddresses]:
        return addressing.nodes(self.settings().nodes)

    def expected_processes(self, settings: Settings) -> list[str]:
        names = [node.name for node in addressing.nodes(settings.nodes)]
        return [
            *(fabric.PROCESS, fabric.RELAY, control_plane.ETCD, control_plane.API_SERVER),
            *(control_plane.CONTROLLER_MANAGER, control_plane.SCHEDULER),
            *names,
            *(f"kubelet-{name}" for name in names),
            *(f"kube-proxy-{name}" for name in [*names, fabric.PROCESS]),
        ]

    def health(self, settings: Settings) -> Health:
        """A look that takes a few milliseconds."""
        expected = self.expected_processes(settings)
        dead = [name for name in expected if not self.processes.alive(name)]
        trouble: list[str] = []
        if self.layout.kubeconfig.exists():
            client = KubeClient(self.layout.kubeconfig)
            try:
                if not client.ready():
                    trouble.append("the API server isn't ready")
                elif not addons.nodes_ready(client, addressing.nodes(settings.nodes)):
                    trouble.append("not every node is Ready")
                elif not addons.dns_available(client):
                    trouble.append("the DNS isn't available")
            except (OSError, http.client.HTTPException, ApiError) as error:
                trouble.append(f"the API server fails: {error}")
        else:
            trouble.append("there is no kubeconfig")
        return Health(dead, trouble)

    def load_image(self, name: str, archives: Sequence[Path]) -> list[str]:
        """Imports OCI or Docker archives into every node; "-" keeps the names they have."""
        given = "" if name == "-" else name
        if given and len(archives) != 1:
            raise ClusterError("one name fits one archive: use - to keep the archives' own names")
        loaded: list[str] = []
        for node in self.nodes():
            for archive in archives:
                loaded += containerd.import_image(self.layout.node(node.name), archive.absolute(), given)
        return sorted(set(loaded))

    def load_project_images(
        self, folders: image_set.ProjectFolders, engine: image_set.ProjectFolders | None = None
    ) -> list[str]:
        """Shares the folders with the nodes and imports the project's images, and the engine's if one is given."""
        started = time.monotonic()
        tools = tools_module.ensure_tools(self._say)
        names = [node.name for node in self.nodes()]
        environment = folders.make_environment(self.layout.pod_environment)
        shares.remember(self.layout, folders.shared(environment))
        images = [
            image_set.pause_image(tools),
            image_set.busybox_image(),
            image_set.project_image(folders, environment),
        ]
        if engine is not None:
            beside = engine.make_environment(self.layout.engine_environment)
            shares.remember(self.layout, engine.shared(beside))
            images.append(image_set.engine_image(engine, beside))
        self._share(names)
        imported = image_set.load(self.layout, names, images)
        for line in imported:
            self._say(f"imported {line}")
        self._say(f"images ready in {time.monotonic() - started:.1f} s")
        return [image.name for image in images]
