"""`make cluster-up`: the embedded cluster with the project's images, and how to use it."""

from __future__ import annotations

import sys
import time

from e2e.kit import cluster
from e2e.kit.shell import CommandFailed


def main() -> int:
    start = time.monotonic()
    try:
        target = cluster.up()
    except CommandFailed as failed:
        print(f"cluster-up: {failed}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ncluster-up: interrupted; run it again, or make cluster-down", file=sys.stderr)
        return 130
    print(f"Up after {time.monotonic() - start:.0f} s. Use it with:\n")
    print(f"  export KUBECONFIG={target.kubectl.kubeconfig} PDCLUSTER_IMAGE={target.image}")
    print(f"  alias kubectl={target.kubectl.binary}\n")
    print("make cluster-down removes it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
