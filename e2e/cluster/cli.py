"""The command line of the embedded cluster: python3 -m e2e.cluster COMMAND.

Needs nothing but Python's standard library, so that it runs before any
virtual environment exists.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import fabric, image_set, nodes, oci, teardown, tools
from .addressing import MAX_NODES
from .cluster import Cluster
from .errors import ClusterError
from .paths import REPOSITORY, Layout

_WRAPPED = ("kubectl", "helm")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m e2e.cluster",
        description="An embedded Kubernetes for tests and demos: real programs, no engine.",
        epilog="PDCLUSTER_STATE and PDCLUSTER_CACHE name the folders of its files.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="bring the cluster up, or mend it")
    up.add_argument("--nodes", type=int, default=2, choices=range(1, MAX_NODES + 1))
    commands.add_parser("down", help="remove the cluster and everything of it")
    stop = commands.add_parser("stop", help="kill one process, for tests of failures; up mends it")
    stop.add_argument("name", help="as status lists them, such as kubelet-node-2 or node-2")
    status = commands.add_parser("status", help="say how the cluster is (exit status 1: not well)")
    status.add_argument("--leaks", action="store_true", help="list what exists of it (exit status 1: anything)")
    commands.add_parser("kubeconfig", help="print the path of the kubeconfig")
    commands.add_parser("env", help="print shell lines that set KUBECONFIG and PATH")
    build_tools = commands.add_parser("build-tools", help="build the programs; print their folder")
    build_tools.add_argument("--only", default="", metavar="NAME,NAME", help="only these programs")
    tool = commands.add_parser("tool", help="print the path of one program, built if need be")
    tool.add_argument("name", choices=tools.programs())

    for name in _WRAPPED:  # main takes these before this parser would read their options
        commands.add_parser(name, help=f"run {name} with any arguments against the cluster")
    inside = commands.add_parser("exec", help="run a command where pods, Services and the cluster's DNS are reachable")
    inside.add_argument("--node", default="", help="in this node's namespaces instead")
    inside.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- COMMAND")

    load = commands.add_parser("load-image", help="import OCI or Docker archives into the nodes")
    load.add_argument("name", help="the image's name; - keeps the names in the archives")
    load.add_argument("archives", nargs="+", type=Path)
    build = commands.add_parser("build-image", help="write an OCI archive from folders")
    build.add_argument("name")
    build.add_argument("output", type=Path)
    build.add_argument("folders", nargs="+", type=Path, help="one layer each")
    build.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    build.add_argument("--entrypoint", nargs="*", default=[])
    build.add_argument("--user", default="")
    build.add_argument("--workdir", default="/")
    images = commands.add_parser("images", help="build and import the project's images")
    images.add_argument("--venv", type=Path, default=REPOSITORY / ".venv")
    images.add_argument("--source", type=Path, default=REPOSITORY)
    images.add_argument(
        "--mount", type=Path, action="append", default=[], help="a further folder to show (the one .venv/.layer names)"
    )
    images.add_argument("--engine", type=Path, help="an engine's virtual environment: its image is made too")
    return parser


def _up(cluster: Cluster, count: int) -> int:
    started = time.monotonic()
    cluster.up(count)
    _say(f"the cluster is up with {count} nodes ({time.monotonic() - started:.1f} s)")
    print(cluster.layout.kubeconfig)
    return 0


def _status(cluster: Cluster, leaks: bool) -> int:
    if leaks:
        found = teardown.leaks(cluster.layout)
        print("\n".join(found) if found else "nothing is left")
        return 1 if found else 0
    settings = cluster.settings()
    health = cluster.health(settings)
    for name in cluster.expected_processes(settings):
        record = cluster.processes.record(name)
        if record is None or not record.alive():
            print(f"{name:32} ended; log: {cluster.layout.log(name)}")
        else:
            print(f"{name:32} pid {nodes.program_pid(record.pid)}")
    for line in health.trouble:
        print(f"trouble: {line}")
    print(f"kubeconfig: {cluster.layout.kubeconfig}")
    print(f"programs:   {tools.ensure_tools(_say, ()).bin_dir}")
    print("note: NetworkPolicy isn't enforced; rdma/hca is emulated (counted, no device)")
    print("the cluster is well" if health.well else "the cluster isn't well: run up again")
    return 0 if health.well else 1


def _exec(cluster: Cluster, node: str, arguments: Sequence[str]) -> int:
    command = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    if not command:
        raise ClusterError("no command is given", hint="python3 -m e2e.cluster exec -- COMMAND")
    cluster.settings()
    if node:
        prefix = nodes.inside(cluster.layout, cluster.processes, node)
    else:
        prefix = fabric.enter(cluster.layout, cluster.processes)
    # The host's loopback, where the relay listens, isn't there.
    os.environ["KUBECONFIG"] = str(cluster.layout.component_kubeconfig("admin"))
    os.execvp(prefix[0], [*prefix, *command])


def _wrapped(cluster: Cluster, program: str, arguments: Sequence[str]) -> int:
    cluster.settings()
    path = tools.ensure_tools(_say, [program])[program]
    os.environ["KUBECONFIG"] = str(cluster.layout.kubeconfig)
    os.execv(path, [program, *arguments])


def _build_image(options: argparse.Namespace) -> int:
    layers = []
    for folder in options.folders:
        tree = oci.Tree()
        tree.add_host_folder(folder)
        layers.append(tree.layer())
    config = oci.ImageConfig(
        environment=(f"PATH={oci.DEFAULT_PATH}", *options.env),
        entrypoint=tuple(options.entrypoint),
        user=options.user,
        working_dir=options.workdir,
    )
    image = oci.Image(options.name, tuple(layers), config)
    image.save(options.output)
    print(f"{options.name} {image.digest()}")
    return 0


def _run(options: argparse.Namespace) -> int:
    if options.command == "build-tools":
        only = [name for name in options.only.split(",") if name]
        print(tools.ensure_tools(_say, only or None).bin_dir)
        return 0
    if options.command == "tool":
        print(tools.ensure_tools(_say, [options.name])[options.name])
        return 0
    if options.command == "build-image":
        return _build_image(options)
    cluster = Cluster(Layout.default(), _say)
    match options.command:
        case "up":
            return _up(cluster, options.nodes)
        case "down":
            cluster.down()
        case "stop":
            cluster.stop(options.name)
        case "status":
            return _status(cluster, options.leaks)
        case "kubeconfig":
            cluster.settings()
            print(cluster.layout.kubeconfig)
        case "env":
            cluster.settings()
            print(f"export KUBECONFIG={cluster.layout.kubeconfig}")
            print(f'export PATH="{tools.ensure_tools(_say).bin_dir}:$PATH"')
        case "exec":
            return _exec(cluster, options.node, options.arguments)
        case "load-image":
            print("\n".join(cluster.load_image(options.name, options.archives)))
        case "images":
            folders = image_set.ProjectFolders(
                options.venv.absolute(),
                options.source.absolute(),
                tuple(path.absolute() for path in options.mount),
            )
            engine = image_set.ProjectFolders(options.engine.absolute(), None) if options.engine else None
            print("\n".join(cluster.load_project_images(folders, engine)))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] and words[0] in _WRAPPED:
            return _wrapped(Cluster(Layout.default(), _say), words[0], words[1:])
        return _run(_parser().parse_args(words))
    except ClusterError as error:
        _say(error.render())
    except ValueError as error:
        _say(f"error: {error}")
    except subprocess.TimeoutExpired as error:
        _say(f"error: {error}\nwhat to do: run down, then up again; is the machine very busy?")
    except (subprocess.CalledProcessError, OSError) as error:
        _say(f"error: {error}\n{(getattr(error, 'stderr', None) or '').strip()}".rstrip())
    except KeyboardInterrupt:
        _say("interrupted: `up` again takes a start that was cut short away and starts anew, `down` removes it")
        return 130
    return 1
