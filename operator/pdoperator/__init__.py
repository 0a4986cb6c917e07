"""pdoperator reconciles PDCluster resources: preflight, pods, wiring, status."""
