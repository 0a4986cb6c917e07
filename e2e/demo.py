"""`make demo`: from nothing to verified KV transfer and equal tokens, and how to look further.

Uses the embedded cluster, or the one KUBECONFIG names. Running it again is fine: everything is applied,
nothing is made twice. `make clean-demo` removes all of it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from e2e.kit import cluster, install, requests, truth
from e2e.kit.kubectl import Kubectl
from e2e.kit.progress import Progress
from e2e.kit.shell import CommandFailed, wait_for

NAMESPACE = "pdcluster-demo"
NAME = "quickstart"
PROMPTS = 6
NEW_TOKENS = 16


def wait_ready(kubectl: Kubectl, progress: Progress, name: str, timeout: float = 300) -> float:
    """Follow the PDCluster until Ready; gives the seconds that took."""
    start = time.monotonic()

    def probe() -> bool:
        ready = kubectl.condition("pdcluster", name, "Ready")
        progress.say(f"Ready={ready.get('status', '-')} {ready.get('reason', '')}: {ready.get('message', '')}")
        return ready.get("status") == "True"

    wait_for(
        f"PDCluster {name} Ready",
        probe,
        timeout=timeout,
        every=0.5,
        context=lambda: (
            kubectl("describe", "pdcluster", name, check=False) + kubectl("get", "pods", "-o", "wide", check=False)
        ),
    )
    return time.monotonic() - start


def demo() -> None:
    """The whole path, once."""
    progress = Progress()
    begin = time.monotonic()
    with progress.step("Cluster: two nodes (embedded unless KUBECONFIG is set; built once, then seconds)"):
        target = cluster.up()
    kubectl = target.kubectl.into(NAMESPACE)
    with progress.step("Operator: helm upgrade --install charts/pdcluster"):
        install.operator(target)
    with progress.step("Model: a tiny float32 Llama, made from a seed, delivered as a ConfigMap"):
        install.namespace(target, NAMESPACE)
        with install.temporary_model() as folder:
            model = install.make_model(Path(folder))
            kubectl.apply(install.model_config_map(model))
            cases = truth.expected(model, prompts=PROMPTS, length=48, new_tokens=NEW_TOKENS)
    with progress.step(f"PDCluster: kubectl apply -f examples/{NAME}.yaml (prefill TP 2, 2 x decode TP 1)"):
        kubectl.apply(install.example(NAME, target.image))
        seconds = wait_ready(kubectl, progress, NAME)
    print(f"    from apply to Ready: {seconds:.1f} s")
    with progress.step(f"Requests: {len(cases)} through the router, compared with a run that is not disaggregated"):
        with kubectl.forward(f"service/{NAME}-router", 30000) as port:
            pairs = requests.compare(f"http://127.0.0.1:{port}", cases)
        for case, answer in pairs:
            mark = "equal" if answer.tokens == case.tokens else "DIFFERENT"
            progress.say(
                f"{mark}: {len(case.prompt)} prompt tokens -> {list(answer.tokens)[:6]}... "
                f"(smallest top-2 logit margin {case.margin:.3f}, {answer.seconds * 1000:.0f} ms)"
            )
        faults = requests.wrong(pairs)
        if faults:
            raise CommandFailed("the router's answers are not the model's:\n" + "\n".join(faults))
    for args in (("get", "pdc", NAME), ("describe", "pdc", NAME)):
        print(f"\n$ kubectl -n {NAMESPACE} {' '.join(args)}")
        print(kubectl(*args), end="")
    print(f"\nDone in {time.monotonic() - begin:.0f} s. To look further:")
    print(f"  export KUBECONFIG={kubectl.kubeconfig} PDCLUSTER_IMAGE={target.image}")
    print(f"  alias kubectl={kubectl.binary}")
    print(f"  kubectl -n {NAMESPACE} get pods,svc -o wide; kubectl -n {NAMESPACE} get events")
    print(f"  kubectl -n {NAMESPACE} apply -f examples/does-not-fit.yaml")
    print(f"  kubectl -n {NAMESPACE} describe pdc does-not-fit")
    print("  kubectl explain pdc.spec")
    print("To clean up: make clean-demo")


def clean() -> None:
    """Remove what the demo made. The embedded cluster goes whole; of a foreign one only our things, and the
    operator stays there while it serves anyone else."""
    own = cluster.given()
    if own is None:
        cluster.cluster_command("down", timeout=180, show=True)
        print(cluster.cluster_command("status", "--leaks"))
        return
    target = cluster.own_cluster(own, image="")
    install.remove_namespace(target, NAMESPACE)
    if others := install.elsewhere(own, NAMESPACE):
        print(f"The operator and its CRD stay: {', '.join(others)} need them.")
        return
    install.uninstall(target)
    install.remove_namespace(target, install.SYSTEM)
    own("delete", "crd", install.CRD, "--ignore-not-found")


def main() -> int:
    try:
        clean() if "--clean" in sys.argv[1:] else demo()
    except (CommandFailed, TimeoutError) as failed:
        print(f"\ndemo: {failed}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted; make demo goes on from here, make clean-demo removes it", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
